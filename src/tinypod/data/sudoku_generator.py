"""As many Sudokus made up as asked for, no two of them symmetric copies.

Importing this module imports numba, which is slow: import it inside functions.
"""

import numpy as np

from tinypod.data.sudoku import Box, Clues, Progress, Puzzles, side_of, signatures
from tinypod.data.sudoku_solver import generate_batch
from tinypod.errors import DataError

PATIENCE = 2000  # attempts in a row that bring no new puzzle before `generate` gives up


def generate(box: Box, count: int, seed: int, clues: Clues | None = None, progress: Progress | None = None) -> Puzzles:
    """Makes `count` puzzles with one solution, no two with the same signature.

    They are minimal (no clue can go); with `clues`, random cells of the answer then fill them up to a number, drawn for
    each between the two; a minimal puzzle that has more already keeps them. Where the two differ, none has more than
    the larger one, and a puzzle's source says how many clues it has.
    """
    side = side_of(box)
    fewest, most = clues or (0, 0)
    if count < 1 or not 0 <= fewest <= most <= side * side:
        raise DataError(f"count {count}, clues {clues}: expected 1 puzzle or more, 0 to {side * side} clues")
    if side > 12:
        raise DataError(f"side {side}: expected at most 12, as minimal puzzles take too long to prove beyond that")
    kept: dict[int, tuple[np.ndarray, ...]] = {}  # by signature
    attempt = misses = 0
    while len(kept) < count:
        size = min(count - len(kept) + 16, 256)  # each puzzle depends on (seed, attempt), never on this
        made = generate_batch(box, seed, attempt, size, (fewest, most))
        attempt += size
        before = len(kept)
        for signature, *puzzle in zip(signatures(made[0], box).tolist(), *made, strict=True):
            too_many = most > fewest and np.count_nonzero(puzzle[0]) > most
            new = puzzle[2] >= 0 and signature not in kept and not too_many
            misses = 0 if new else misses + 1
            if new and len(kept) < count:
                kept[signature] = tuple(puzzle)
            if misses == PATIENCE and len(kept) < count:
                raise DataError(
                    f"found {len(kept)} of {count} different {side}x{side} puzzles: {PATIENCE} attempts in a row gave "
                    f"symmetric copies{', too many clues' if most > fewest else ''} or too long searches; ask for fewer"
                )
        if progress:
            progress(len(kept) - before)
    questions, answers, ratings = (np.stack(column) for column in zip(*kept.values(), strict=True))
    sources = ["generated"] * count
    if fewest < most:
        sources = [f"{number}_clues" for number in (questions > 0).sum(1)]
    return Puzzles(questions, answers, sources, ratings)


def make_one(box: Box, number: int, seed: int = 0) -> np.ndarray:
    """The minimal puzzle of that number, uint8 [S]: always the same one."""
    if side_of(box) > 12:
        raise DataError(f"side {side_of(box)}: expected at most 12 to make a puzzle up")
    while True:
        questions, _, ratings = generate_batch(box, seed, number, 1)
        if ratings[0] >= 0:
            return questions[0]
        number += 1  # given up on
