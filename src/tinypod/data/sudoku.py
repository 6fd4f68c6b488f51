"""Sudoku grids: their rules, their text, their tokens, and what symmetric copies of a puzzle share.

A box is (rows, columns): (2, 2), (2, 3) and (3, 3) make grids of side n = 4, 6 and 9; n is at most 16.
A grid is uint8 [S], S = n * n, row by row, 0 for blank; in text `.` or `0` is blank and A..G are 10..16; as tokens 0 is
padding, 1 blank, 2 and up the digits.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tinypod.errors import DataError

Box = tuple[int, int]
Clues = tuple[int, int]  # what a minimal puzzle is filled up to: a number between the two
Progress = Callable[[int], object]  # called with the rows or puzzles done since the last call

SYMBOLS = ".123456789ABCDEFG"
FIRST_DIGIT = 2  # its token
CHUNK_ROWS = 16384  # puzzles looked at together


class Puzzles(NamedTuple):
    questions: np.ndarray  # uint8 [N, S], 0 blank
    answers: np.ndarray  # uint8 [N, S]
    sources: list[str]
    ratings: np.ndarray  # int32 [N], guesses that a solver of singles needs


def join(*parts: Puzzles) -> Puzzles:
    return Puzzles(
        np.concatenate([part.questions for part in parts]),
        np.concatenate([part.answers for part in parts]),
        [source for part in parts for source in part.sources],
        np.concatenate([part.ratings for part in parts]),
    )


def side_of(box: Box) -> int:
    side = box[0] * box[1]
    if min(box) < 1 or not 2 <= side <= 16:
        raise DataError(f"box {box[0]}x{box[1]}: expected rows x columns with a product of 2 to 16, such as 3x3")
    return side


@lru_cache
def unit_cells(box: Box) -> np.ndarray:
    """Cells of every row, column and box, int [3, n, n]."""
    side, (rows, columns) = side_of(box), box
    cells = np.arange(side * side).reshape(side, side)
    boxes = cells.reshape(columns, rows, rows, columns).swapaxes(1, 2).reshape(side, side)
    units = np.stack([cells, cells.T, boxes])
    units.flags.writeable = False
    return units


def breaks_rules(grid: np.ndarray, box: Box = (3, 3)) -> np.ndarray:
    """Marks, bool [..., S], each cell whose value is repeated in its row, column or box."""
    broken = np.zeros(grid.shape, bool)
    for cells in unit_cells(box):
        values = grid[..., cells]
        repeats = (values[..., :, None] == values[..., None, :]).sum(-1) > 1
        broken[..., cells] |= repeats & (values != 0)
    return broken


@lru_cache
def _codes(side: int) -> np.ndarray:
    """ASCII code to cell value, 255 for a character that no grid of this side may hold."""
    codes = np.full(256, 255, np.uint8)
    codes[[ord(symbol) for symbol in SYMBOLS[: side + 1]]] = np.arange(side + 1)
    codes[ord("0")] = 0
    return codes


def encode(texts: list[str], side: int) -> np.ndarray:
    """Texts of n * n characters each as uint8 [N, S]."""
    ascii_text = "".join(texts).encode("ascii", "replace")
    return _codes(side)[np.frombuffer(ascii_text, np.uint8)].reshape(len(texts), side * side)


def place(cell: int, side: int) -> str:
    return f"row {cell // side + 1}, column {cell % side + 1}"


def allowed(side: int) -> str:
    return f"`.` or `0` for blank and 1-{side if side < 10 else f'9, A-{SYMBOLS[side]}'}"


def parse_puzzle(text: str, box: Box = (3, 3)) -> np.ndarray:
    """Reads one puzzle, on one line or several, as uint8 [S]."""
    side = side_of(box)
    text = "".join(text.split())
    if len(text) != side * side:
        raise DataError(f"puzzle has {len(text)} characters, expected {side * side} ({side} rows of {side})")
    grid = encode([text], side)[0]
    for cell in np.flatnonzero(grid == 255)[:1]:
        raise DataError(f"puzzle has {text[cell]!r} at {place(cell, side)}, expected {allowed(side)}")
    for cell in np.flatnonzero(breaks_rules(grid, box))[:1]:
        raise DataError(
            f"puzzle has {text[cell]} at {place(cell, side)} and again in the same row, column or box, "
            "expected it there once"
        )
    return grid


def format_puzzle(grid: np.ndarray) -> str:
    """The puzzle on one line, `.` for blank: what `parse_puzzle` reads."""
    return "".join(SYMBOLS[value] for value in grid.ravel())


def to_tokens(grids: np.ndarray) -> np.ndarray:
    return (grids + (FIRST_DIGIT - 1)).astype(np.uint8)


def to_digits(tokens: np.ndarray) -> np.ndarray:
    """0 for blank and padding."""
    return np.maximum(tokens.astype(np.int32) - (FIRST_DIGIT - 1), 0).astype(np.uint8)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: equal in, equal out, otherwise as good as random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def signatures(questions: np.ndarray, box: Box = (3, 3)) -> np.ndarray:
    """Hashes, uint64 [N], that every symmetric copy of a puzzle shares and hardly any other puzzle does."""
    chunks = [questions[i : i + CHUNK_ROWS] for i in range(0, len(questions), CHUNK_ROWS)]
    return np.concatenate([_refine(chunk, box) for chunk in chunks] or [np.zeros(0, np.uint64)])


def _refine(questions: np.ndarray, box: Box, rounds: int = 5) -> np.ndarray:
    """Colour refinement (Weisfeiler and Leman) of clues by rows, columns, boxes, bands, stacks and digits.

    Sums forget order, so permuted copies agree; rows and columns share a salt where boxes are square, so that
    transposes do. Four rounds tell 8 000 hard puzzles apart but for true copies; a fifth is margin.
    """
    side, (box_rows, box_columns) = side_of(box), box
    num = len(questions)
    puzzle, cell = np.nonzero(questions)
    row, column = np.divmod(cell, side)
    inner = row // box_rows * box_rows + column // box_columns
    digit = questions[puzzle, cell].astype(np.int64) - 1
    square = box_rows == box_columns
    groups = [  # (unit of each clue, salt, units in a band or stack)
        (puzzle * side + row, 1, box_rows),
        (puzzle * side + column, 1 if square else 2, box_columns),
        (puzzle * side + inner, 3, 0),
        (puzzle * side + digit, 4, 0),
    ]
    colour = _mix(np.ones(len(cell), np.uint64))
    for _ in range(rounds):
        heard = np.zeros_like(colour)
        for unit, salt, band in groups:
            nodes = np.zeros(num * side, np.uint64)
            np.add.at(nodes, unit, colour)
            nodes = _mix(nodes + np.uint64(salt))
            if band:
                bands = nodes.reshape(-1, band).sum(1)
                nodes = _mix(nodes + np.repeat(_mix(bands), band))
            heard += nodes[unit]
        colour = _mix(_mix(colour + np.uint64(5)) + heard)
    total = np.zeros(num, np.uint64)
    np.add.at(total, puzzle, _mix(colour))
    return total
