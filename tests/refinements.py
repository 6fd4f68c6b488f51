"""Refinements made by hand, for what shows and counts them."""

import numpy as np

from tinypod.solve.display import Refinement


def solution(box: tuple[int, int]) -> np.ndarray:
    """uint8 [S]: rows shifted so that each row, column and box holds each value once."""
    rows, columns = box
    side = rows * columns
    row, column = np.divmod(np.arange(side**2), side)
    return ((columns * (row % rows) + row // rows + column) % side + 1).astype(np.uint8)


def with_cells(grid: np.ndarray, cells: dict[int, int]) -> np.ndarray:
    grid = grid.copy()
    for cell, value in cells.items():
        grid[cell] = value
    return grid


def make_refinement(grids, halts, *, clues=(0, 5, 10), box=(2, 2)) -> Refinement:
    question = np.zeros_like(solution(box))
    question[list(clues)] = solution(box)[list(clues)]
    return Refinement(question, np.stack(grids), np.array(halts), box)


# 1 2 | 3 4      the solution of the 2x2 boxes that the crafted cases start from; its cells are numbered
# 3 4 | 1 2      0..15, the clues are cells 0, 5 and 10
# ----+----
# 2 3 | 4 1
# 4 1 | 2 3
GOOD = solution((2, 2))
REPEAT = with_cells(GOOD, {15: 1})  # repeats the 1 at 11 (column and box) and at 13 (row)
CLUE_LOST = with_cells(GOOD, {10: 3})  # a 3 over the clue 4: meets 9 in its row, 2 in its column, 15 in its box
BLANK = with_cells(GOOD, {15: 0})
