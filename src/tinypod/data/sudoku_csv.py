"""Sudoku puzzles from CSV files, each proven to have the one solution that its row gives.

Every row of a file passes the cheap checks (lengths, characters, agreement, rules); only the rows kept go to the
exhaustive solver.
"""

import csv
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from tinypod.data.sudoku_rules import (
    CHUNK_ROWS,
    SYMBOLS,
    Box,
    Progress,
    Puzzles,
    allowed,
    encode,
    place,
    side_of,
    unit_cells,
)
from tinypod.errors import DataError

Description = Callable[[int], str]  # what is wrong with row i
HUB_REPO = "sapientinc/sudoku-extreme"


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
        return texts, encode([text if len(text) == size else blank for text in texts], side), ~fits

    def describe(name: str, texts: list[str], wrong: np.ndarray, expected: str) -> Description:
        def at(row: int) -> str:
            cell = int(wrong[row].argmax())
            return f"{name} has {texts[row][cell]!r} at {place(cell, side)}, expected {expected}"

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
            (alien.any(1), describe("question", questions, alien, allowed(side))),
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
    from tinypod.data import sudoku_solver as solver  # numba is slow to import

    rows = 4096 if solver.COMPILED else 64
    parts = [slice(i, i + rows) for i in range(0, len(lines), rows)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compiled, the solver holds no lock
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
