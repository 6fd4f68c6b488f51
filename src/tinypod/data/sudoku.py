"""Sudoku puzzles: rules and text (from `sudoku_rules`), and as many made up as asked for, no two of them copies."""

from collections.abc import Collection

import numpy as np

from tinypod.data.sudoku_rules import (
    SYMBOLS,
    Box,
    Progress,
    Puzzles,
    breaks_rules,
    format_puzzle,
    parse_puzzle,
    side_of,
    signatures,
    unit_cells,
)
from tinypod.errors import DataError

__all__ = [
    "SYMBOLS",
    "Puzzles",
    "breaks_rules",
    "format_puzzle",
    "generate",
    "parse_puzzle",
    "side_of",
    "signatures",
    "unit_cells",
]

PATIENCE = 2000  # attempts in a row that bring no new puzzle before `generate` gives up


def generate(
    box: Box,
    count: int,
    seed: int,
    clues: int | None = None,
    exclude: Collection[int] | np.ndarray | None = None,
    progress: Progress | None = None,
) -> Puzzles:
    """Makes `count` puzzles with one solution, no two with the same signature and none with one in `exclude`.

    They are minimal (no clue can go); with `clues`, random cells of the answer then make up that many.
    """
    side = side_of(box)
    if count < 1 or (clues is not None and not 0 <= clues <= side * side):
        raise DataError(f"count {count}, clues {clues}: expected 1 puzzle or more, 0 to {side * side} clues")
    if side > 12:
        raise DataError(f"side {side}: expected at most 12, as minimal puzzles take too long to prove beyond that")
    from tinypod.data import sudoku_solver  # numba is slow to import

    seen = set() if exclude is None else {int(signature) for signature in exclude}
    kept: list[tuple[np.ndarray, ...]] = []
    attempt = misses = 0
    while len(kept) < count:
        size = min(count - len(kept) + 16, 256)  # each puzzle depends on (seed, attempt), never on this
        questions, answers, ratings = sudoku_solver.generate_batch(box, seed, attempt, size, clues or 0)
        attempt += size
        before = len(kept)
        for row, signature in enumerate(signatures(questions, box).tolist()):
            if ratings[row] < 0 or signature in seen:
                misses += 1
                if misses == PATIENCE:
                    raise DataError(
                        f"found {len(kept)} of {count} different {side}x{side} puzzles: {PATIENCE} attempts "
                        "in a row gave symmetric copies, excluded puzzles or too long searches; ask for fewer"
                    )
                continue
            misses = 0
            seen.add(signature)
            kept.append((questions[row], answers[row], ratings[row]))
            if len(kept) == count:
                break
        if progress:
            progress(len(kept) - before)
    questions, answers, ratings = (np.stack(column) for column in zip(*kept, strict=True))
    return Puzzles(questions, answers, ["generated"] * count, ratings)
