"""Sudokus made up: minimal ones, or with more clues, as many as asked for and no two of them symmetric copies.

Importing this module imports numba, which is slow: import it inside functions.
"""
# mypy: allow-untyped-defs

import numpy as np

from tinypod.data.sudoku import Box, Progress, Puzzles, side_of, signatures
from tinypod.data.sudoku_solver import (
    MASK,
    UINT,
    UNLIMITED,
    compiled,
    masks_to_digits,
    mix,
    native,
    random_below,
    search,
    tables,
)
from tinypod.errors import DataError

PATIENCE = 2000  # attempts in a row that bring no new puzzle before `generate` gives up
MAX_GUESSES = 100_000  # of a search, before an attempt is given up
SEED = UINT(0x5851F42D4C957F2D)


@compiled
def _shuffle(order, rng):
    for i in range(len(order) - 1, 0, -1):
        j = random_below(rng, i + 1)
        order[i], order[j] = order[j], order[i]


@compiled
def _make(blank, seed, attempt, rng, no_rng, units, peers, clues):
    """A puzzle and its answer as masks (see `sudoku_solver`), and its rating; -1 marks an attempt given up."""
    rng[0] = mix((mix(seed ^ SEED) + attempt) & MASK)
    found, _, answer = search(blank, units, peers, 1, MAX_GUESSES, rng)
    if found != 1:
        return blank, blank, -1
    puzzle, order = answer.copy(), list(range(len(blank)))
    _shuffle(order, rng)
    for cell in order:
        # A clue may go if and only if no solution has another digit in its cell.
        other = puzzle.copy()
        other[cell] = blank[cell] ^ answer[cell]
        found, _, _ = search(other, units, peers, 1, MAX_GUESSES, no_rng)
        if found < 0:
            return blank, blank, -1
        if found == 0:
            puzzle[cell] = blank[cell]
    missing = clues
    for cell in order:
        missing -= puzzle[cell] != blank[cell]
    _shuffle(order, rng)
    for cell in order:
        if missing > 0 and puzzle[cell] == blank[cell]:
            puzzle[cell] = answer[cell]
            missing -= 1
    _, guesses, _ = search(puzzle, units, peers, 2, UNLIMITED, no_rng)
    return puzzle, answer, guesses


def generate_batch(
    box: Box, seed: int, first: int, num: int, clues: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Puzzles, answers and ratings of attempts first..first+num-1; rating -1 marks one given up on."""
    full = 2 ** (box[0] * box[1]) - 1
    blank = native(np.full((box[0] * box[1]) ** 2, full, np.int32))
    rng, no_rng = native(np.zeros(1, np.uint64)), native(np.zeros(0, np.uint64))
    made = [
        _make(blank, UINT(seed % 2**64), UINT(attempt), rng, no_rng, *tables(box), clues)
        for attempt in range(first, first + num)
    ]
    puzzles, answers, ratings = zip(*made, strict=True)
    return masks_to_digits(puzzles, full), masks_to_digits(answers, full), np.array(ratings, np.int32)


def generate(box: Box, count: int, seed: int, clues: int | None = None, progress: Progress | None = None) -> Puzzles:
    """Makes `count` puzzles with one solution, no two with the same signature.

    They are minimal (no clue can go); with `clues`, random cells of the answer then make up that many.
    """
    side = side_of(box)
    if count < 1 or (clues is not None and not 0 <= clues <= side * side):
        raise DataError(f"count {count}, clues {clues}: expected 1 puzzle or more, 0 to {side * side} clues")
    if side > 12:
        raise DataError(f"side {side}: expected at most 12, as minimal puzzles take too long to prove beyond that")
    kept: dict[int, tuple[np.ndarray, ...]] = {}  # by signature
    attempt = misses = 0
    while len(kept) < count:
        size = min(count - len(kept) + 16, 256)  # each puzzle depends on (seed, attempt), never on this
        made = generate_batch(box, seed, attempt, size, clues or 0)
        attempt += size
        before = len(kept)
        for signature, *puzzle in zip(signatures(made[0], box).tolist(), *made, strict=True):
            new = puzzle[2] >= 0 and signature not in kept
            misses = 0 if new else misses + 1
            if new and len(kept) < count:
                kept[signature] = tuple(puzzle)
            if misses == PATIENCE and len(kept) < count:
                raise DataError(
                    f"found {len(kept)} of {count} different {side}x{side} puzzles: {PATIENCE} attempts "
                    "in a row gave symmetric copies or too long searches; ask for fewer"
                )
        if progress:
            progress(len(kept) - before)
    questions, answers, ratings = (np.stack(column) for column in zip(*kept.values(), strict=True))
    return Puzzles(questions, answers, ["generated"] * count, ratings)
