"""Sudoku puzzles: read and proven from CSV, generated, told apart up to symmetry, parsed and drawn.

A box is (rows, columns): (2, 2), (2, 3) and (3, 3) make grids of side n = 4, 6 and 9; n is at most 16.
A grid is uint8 [S], S = n * n, row by row, 0 for blank; in text `.` or `0` is blank and A..G are 10..16.

Every row of a file passes the cheap checks (lengths, characters, agreement, rules); only the rows kept go to
the exhaustive solver, which proves that the answer is the only one.
"""

import csv
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from tinypod.errors import DataError

Box = tuple[int, int]
Progress = Callable[[int], object]  # told how many rows or puzzles were done since the last call

Description = Callable[[int], str]  # what is wrong with row i

SYMBOLS = ".123456789ABCDEFG"
CHUNK_ROWS = 16384
PATIENCE = 2000  # attempts in a row that bring no new puzzle before `generate` gives up
HUB_REPO = "sapientinc/sudoku-extreme"


class Puzzles(NamedTuple):
    questions: np.ndarray  # uint8 [N, S], 0 blank
    answers: np.ndarray  # uint8 [N, S]
    sources: list[str]
    ratings: np.ndarray  # int32 [N], guesses that a solver of singles needs


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


def _encode(texts: list[str], side: int) -> np.ndarray:
    """Texts of n * n characters each as uint8 [N, S]."""
    ascii_text = "".join(texts).encode("ascii", "replace")
    return _codes(side)[np.frombuffer(ascii_text, np.uint8)].reshape(len(texts), side * side)


def _place(cell: int, side: int) -> str:
    return f"row {cell // side + 1}, column {cell % side + 1}"


def _allowed(side: int) -> str:
    return f"`.` or `0` for blank and 1-{side if side < 10 else f'9, A-{SYMBOLS[side]}'}"


def parse_puzzle(text: str, box: Box = (3, 3)) -> np.ndarray:
    """Reads one puzzle, on one line or several, as uint8 [S]."""
    side = side_of(box)
    text = "".join(text.split())
    if len(text) != side * side:
        raise DataError(f"puzzle has {len(text)} characters, expected {side * side} ({side} rows of {side})")
    grid = _encode([text], side)[0]
    for cell in np.flatnonzero(grid == 255)[:1]:
        raise DataError(f"puzzle has {text[cell]!r} at {_place(cell, side)}, expected {_allowed(side)}")
    for cell in np.flatnonzero(breaks_rules(grid, box))[:1]:
        raise DataError(
            f"puzzle has {text[cell]} at {_place(cell, side)} and again in the same row, column or box, "
            "expected it there once"
        )
    return grid


def format_puzzle(grid: np.ndarray) -> str:
    """The puzzle on one line, `.` for blank: what `parse_puzzle` reads."""
    return "".join(SYMBOLS[value] for value in grid.ravel())


def _solver() -> ModuleType:
    try:
        from tinypod.data import sudoku_solver
    except ImportError as error:
        raise DataError(
            f"Sudoku puzzles are proven by a solver that needs numba: pip install numba ({error})"
        ) from error
    return sudoku_solver


class _BadRows:
    """Remembers the first bad line of a file and how many there are."""

    def __init__(self, path: Path):
        self.path, self.first, self.count = path, (0, ""), 0

    def add(self, lines: np.ndarray, masks: list[tuple[np.ndarray, Description]]) -> None:
        """Takes masks of bad rows with what to say of row i; an earlier mask speaks for a row of several."""
        bad = np.logical_or.reduce([mask for mask, _ in masks])
        if bad.any() and not self.count:
            row = int(bad.argmax())
            self.first = int(lines[row]), next(describe(row) for mask, describe in masks if mask[row])
        self.count += int(bad.sum())

    def check(self) -> None:
        if self.count:
            more = f" ({self.count - 1} more bad rows follow)" if self.count > 1 else ""
            raise DataError(f"{self.path}:{self.first[0]}: {self.first[1]}{more}")


def _read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of the header and of each row that is not blank."""
    reader = None
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for fields in reader:
                if fields and (len(fields) > 1 or fields[0].strip()):
                    yield reader.line_num, fields
    except UnicodeDecodeError as error:
        with open(path, "rb") as raw:  # text is decoded in blocks, so find the line again
            line = next(i for i, text in enumerate(raw, 1) if "\ufffd" in text.decode("utf-8", "replace"))
        raise DataError(f"{path}:{line}: not UTF-8 text ({error.reason}), expected a CSV file") from error
    except csv.Error as error:
        line = reader.line_num if reader else 1
        raise DataError(f"{path}:{line}: not a row of CSV ({error}), expected comma-separated fields") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), expected a CSV file of puzzles") from error


def _read_header(path: Path) -> tuple[Iterator[tuple[int, list[str]]], list[str]]:
    rows = _read_rows(path)
    line, header = next(rows, (1, []))
    columns = [name.strip() for name in header]
    if not {"question", "answer"} <= set(columns):
        found = f"columns {', '.join(columns)}" if columns else "an empty file"
        raise DataError(f"{path}:{line}: found {found}, expected a header with question, answer (source, rating)")
    return rows, columns


def _rating(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def _check_chunk(
    lines: np.ndarray, rows: list[list[str]], columns: list[str], box: Box, bad: _BadRows
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Questions, answers and ratings of some rows after every check that needs no search."""
    side = side_of(box)
    size, width, blank = side * side, len(columns), "." * side * side
    widths = np.array([len(row) for row in rows])
    if (widths != width).any():
        rows = [[*row, *[""] * width][:width] for row in rows]

    def read(name: str) -> tuple[list[str], np.ndarray, np.ndarray]:
        texts = [row[columns.index(name)] for row in rows]
        fits = np.array([len(text) == size for text in texts])
        return texts, _encode([text if len(text) == size else blank for text in texts], side), ~fits

    def describe(name: str, texts: list[str], wrong: np.ndarray, expected: str) -> Description:
        def at(row: int) -> str:
            cell = int(wrong[row].argmax())
            return f"{name} has {texts[row][cell]!r} at {_place(cell, side)}, expected {expected}"

        return at

    questions, question, question_misfit = read("question")
    answers, answer, answer_misfit = read("answer")
    alien, unfilled = question == 255, (answer == 255) | (answer == 0)
    differs = (question != 0) & (question != answer)
    bits = np.left_shift(np.uint16(1), answer - 1, dtype=np.uint16)
    seen = [np.bitwise_or.reduce(bits[:, cells], axis=-1) for cells in unit_cells(box)]  # [3, N, n]
    texts, ratings = ["0"] * len(rows), np.zeros(len(rows))
    if "rating" in columns:
        texts = [row[columns.index("rating")] for row in rows]
        ratings = np.array([_rating(text) for text in texts])
    bad.add(
        lines,
        [
            (widths != width, lambda i: f"{widths[i]} fields, expected {width} ({', '.join(columns)})"),
            (question_misfit, lambda i: f"question has {len(questions[i])} characters, expected {size}"),
            (alien.any(1), describe("question", questions, alien, _allowed(side))),
            (answer_misfit, lambda i: f"answer has {len(answers[i])} characters, expected {size}"),
            (unfilled.any(1), describe("answer", answers, unfilled, f"one of {SYMBOLS[1 : side + 1]}")),
            (differs.any(1), describe("answer", answers, differs, "the question's digit")),
            (
                (np.array(seen) != 2**side - 1).any((0, 2)),
                lambda i: "answer has a digit twice in a row, column or box, expected once",
            ),
            (~(np.abs(ratings) < 2**31), lambda i: f"rating is {texts[i]!r}, expected a number"),
        ],
    )
    return question, answer, ratings


def read_csv(
    path: str | os.PathLike[str],
    box: Box = (3, 3),
    subsample: int | None = None,
    seed: int = 0,
    source: str | None = None,
    progress: Progress | None = None,
) -> Puzzles:
    """Reads columns question, answer and, if present, source and rating; `subsample` keeps that many rows.

    `source` names the rows of a file without such a column (default: the file's stem). Which rows are
    kept, in the file's order, depends on `seed`, `subsample` and the number of rows alone. `progress` hears
    of rows proven.
    """
    path = Path(path)
    side = side_of(box)
    rows, columns = _read_header(path)
    chosen = None
    if subsample is not None:
        total = sum(1 for _ in rows)
        if not 0 < subsample <= total:
            raise DataError(f"{path}: asked for {subsample} rows, expected a number from 1 to the file's {total}")
        chosen = np.zeros(total, bool)
        chosen[np.random.default_rng(seed).choice(total, subsample, replace=False)] = True
        rows, _ = _read_header(path)

    bad, start = _BadRows(path), 0
    all_lines, questions, answers, ratings, sources = [], [], [], [], []
    names: dict[str, str] = {}  # one string object a source, not one a row
    while chunk := list(islice(rows, CHUNK_ROWS)):
        lines, fields = np.array([line for line, _ in chunk]), [row for _, row in chunk]
        question, answer, rating = _check_chunk(lines, fields, columns, box, bad)
        keep = np.arange(len(chunk))
        if chosen is not None:
            keep = np.flatnonzero(chosen[start : start + len(chunk)])
        start += len(chunk)
        if bad.count:
            continue  # only the count of bad rows is still wanted
        questions.append(question[keep])
        answers.append(answer[keep])
        ratings.append(np.rint(rating[keep]).astype(np.int32))
        all_lines.append(lines[keep])
        if "source" in columns:
            column = columns.index("source")
            sources += [names.setdefault(name, name) for name in (fields[i][column] for i in keep)]
        else:
            sources += [source or path.stem] * len(keep)
    bad.check()
    if not start:
        raise DataError(f"{path}: has a header and no rows, expected puzzles of {side * side} characters")
    puzzles = Puzzles(np.concatenate(questions), np.concatenate(answers), sources, np.concatenate(ratings))
    _prove(puzzles, np.concatenate(all_lines), box, bad, progress)
    return puzzles


def _prove(puzzles: Puzzles, lines: np.ndarray, box: Box, bad: _BadRows, progress: Progress | None) -> None:
    """Raises unless each answer is the only solution; each is a solution, by the checks before."""
    solver = _solver()
    parts = [slice(i, i + 4096) for i in range(0, len(lines), 4096)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the solver holds no lock
        results = pool.map(lambda part: solver.solve_batch(puzzles.questions[part], box), parts)
        for part, solved in zip(parts, results, strict=True):
            differs = (solved.solutions != puzzles.answers[part]).any(1)
            masks: list[tuple[np.ndarray, Description]] = [
                (solved.counts == 0, lambda i: "question has no solution, expected exactly one"),
                (solved.counts > 1, lambda i: "question has more than one solution, expected exactly one"),
                (differs, lambda i: "answer is not the question's solution"),
            ]
            bad.add(lines[part], masks)
            if progress:
                progress(len(differs))
    bad.check()


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
    solver = _solver()
    seen = set() if exclude is None else {int(signature) for signature in exclude}
    kept: list[tuple[np.ndarray, ...]] = []
    attempt = misses = 0
    while len(kept) < count:
        size = min(count - len(kept) + 16, 256)  # each puzzle depends on (seed, attempt), never on this
        questions, answers, ratings = solver.generate_batch(box, seed, attempt, size, clues or 0)
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


def download(cache_dir: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """Fetches Sudoku-Extreme's train.csv and test.csv from the Hugging Face hub or its cache."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise DataError(f"{HUB_REPO} needs huggingface_hub: pip install 'tinypod[hub]'") from error
    files = {}
    for split in ("train", "test"):
        try:
            name = hf_hub_download(HUB_REPO, f"{split}.csv", repo_type="dataset", cache_dir=cache_dir)
        except Exception as error:  # the hub's HTTP libraries share no base class
            raise DataError(
                f"{HUB_REPO}/{split}.csv cannot be downloaded ({type(error).__name__}: {error}); "
                "pass local CSV files, or generate puzzles"
            ) from error
        files[split] = Path(name)
    return files
