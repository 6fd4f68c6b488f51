"""Sudoku puzzles from CSV files, each proven to have the one solution that its row gives.

Every row of a file passes the cheap checks (lengths, characters, agreement, rules); only the rows kept go to the
exhaustive solver. The first bad line is named.
"""

import csv
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

from tinypod.data.sudoku import CHUNK_ROWS, SYMBOLS, Box, Progress, Puzzles, allowed, encode, place, side_of, unit_cells
from tinypod.errors import DataError

Fault = tuple[np.ndarray, Callable[[int], str]]  # which rows have it, and what is wrong with row i
Row = tuple[int, list[str]]  # line number, fields
HUB_REPO = "sapientinc/sudoku-extreme"


def _check(path: Path, lines: np.ndarray, faults: list[Fault]) -> None:
    """Raises for the first bad row; of several faults in it, the one listed first is named."""
    bad = np.logical_or.reduce([mask for mask, _ in faults])
    if bad.any():
        row = int(bad.argmax())
        fault = next(describe(row) for mask, describe in faults if mask[row])
        raise DataError(f"{path}:{lines[row]}: {fault}")


def _read_lines(path: Path) -> Iterator[str]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 text ({error.reason}), expected a CSV file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), expected a CSV file of puzzles") from error


def _read_rows(path: Path) -> Iterator[Row]:
    """Line number and fields of the header and of each row that is not blank."""
    reader = csv.reader(_read_lines(path), strict=True)
    try:
        for fields in reader:
            if fields and (len(fields) > 1 or fields[0].strip()):
                yield reader.line_num, fields
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num}: not a row of CSV ({error}), expected comma-separated fields"
        ) from error


def _read_header(rows: Iterator[Row], path: Path) -> list[str]:
    line, header = next(rows, (1, []))
    columns = [name.strip() for name in header]
    if not {"question", "answer"} <= set(columns):
        found = f"columns {', '.join(columns)}" if columns else "an empty file"
        raise DataError(f"{path}:{line}: found {found}, expected a header with question, answer (source, rating)")
    return columns


def _choose(path: Path, subsample: int | None, seed: int, besides: int) -> np.ndarray:
    """Which rows of the file are kept: by the seed, and the number of rows alone."""
    rows = _read_rows(path)
    _read_header(rows, path)
    total = sum(1 for _ in rows)
    if total == 0:
        raise DataError(f"{path}: has a header and no rows, expected puzzles")
    if subsample is None:
        return np.ones(total, bool)
    if not 0 < subsample <= total:
        raise DataError(f"{path}: asked for {subsample} rows, expected a number from 1 to the file's {total}")
    if besides + subsample > total:
        raise DataError(
            f"{path}: asked for {subsample} rows besides {besides} for training, and it has {total}; take fewer"
        )
    chosen = np.zeros(total, bool)
    if besides:
        left = np.setdiff1d(np.arange(total), np.flatnonzero(_choose(path, besides, seed, 0)))
        chosen[np.random.default_rng([seed, 1]).choice(left, subsample, replace=False)] = True
    else:
        chosen[np.random.default_rng(seed).choice(total, subsample, replace=False)] = True
    return chosen


def read_csv(
    path: Path,
    box: Box = (3, 3),
    subsample: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    besides: int = 0,
) -> Puzzles:
    """Reads columns question, answer and, if present, source (else the file's stem) and rating (else 0).

    `subsample` keeps that many rows, in the file's order; with `besides`, of those that a subsample of that size
    leaves. `progress` counts rows proven.
    """
    chosen, rows = _choose(path, subsample, seed, besides), _read_rows(path)
    columns, start = _read_header(rows, path), 0
    parts = []
    while chunk := list(islice(rows, CHUNK_ROWS)):
        keep = chosen[start : start + len(chunk)]
        parts.append([array[keep] for array in _read_chunk(path, columns, chunk, box)])
        start += len(chunk)
    lines, questions, answers, sources, ratings = (np.concatenate(part) for part in zip(*parts, strict=True))
    _prove(path, lines, questions, box, progress)
    return Puzzles(questions, answers, sources.tolist(), np.rint(ratings).astype(np.int32))


def _read_chunk(path: Path, columns: list[str], chunk: list[Row], box: Box) -> tuple[np.ndarray, ...]:
    """Lines, questions, answers, sources and ratings of some rows, after every check that needs no search."""
    lines, widths = (np.array(column) for column in zip(*((line, len(row)) for line, row in chunk), strict=True))
    texts = {name: column for name, *column in zip_longest(columns, *(row for _, row in chunk), fillvalue="")}
    side = side_of(box)
    size = side * side
    length, grid = {}, {}
    for name in ("question", "answer"):
        length[name] = np.array([len(text) for text in texts[name]])
        grid[name] = encode([text if len(text) == size else "." * size for text in texts[name]], side)

    def misfit(name: str) -> Fault:
        return length[name] != size, lambda i: f"{name} has {length[name][i]} characters, expected {size}"

    def wrong(name: str, cells: np.ndarray, expected: str) -> Fault:
        def describe(row: int) -> str:
            cell = int(cells[row].argmax())
            return f"{name} has {texts[name][row][cell]!r} at {place(cell, side)}, expected {expected}"

        return np.any(cells, axis=1), describe

    question, answer = grid["question"], grid["answer"]
    bits = np.left_shift(np.uint16(1), answer - 1, dtype=np.uint16)
    seen = np.array([np.bitwise_or.reduce(bits[:, cells], axis=-1) for cells in unit_cells(box)])  # [3, N, n]
    rating = texts.get("rating", ["0"] * len(question))
    ratings = np.array([_to_rating(text) for text in rating])
    faults: list[Fault] = [
        (widths != len(columns), lambda i: f"{widths[i]} fields, expected {len(columns)} ({', '.join(columns)})"),
        misfit("question"),
        wrong("question", question == 255, allowed(side)),
        misfit("answer"),
        wrong("answer", (answer == 255) | (answer == 0), f"one of {SYMBOLS[1 : side + 1]}"),
        wrong("answer", (question != 0) & (question != answer), "the question's digit"),
        (
            (seen != 2**side - 1).any((0, 2)),
            lambda i: "answer has a digit twice in a row, column or box, expected once",
        ),
        (~(np.abs(ratings) < 2**31), lambda i: f"rating is {rating[i]!r}, expected a number"),
    ]
    _check(path, lines, faults)
    sources = np.array(texts.get("source", [path.stem] * len(lines)), object)
    return lines, question, answer, sources, ratings


def _to_rating(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def _prove(path: Path, lines: np.ndarray, questions: np.ndarray, box: Box, progress: Progress | None) -> None:
    """Raises unless each question has one solution; its answer is a solution, by the checks before."""
    from tinypod.data import sudoku_solver as solver  # numba is slow to import

    rows = 4096 if solver.COMPILED else 64
    parts = [slice(i, i + rows) for i in range(0, len(lines), rows)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compiled, the solver holds no lock
        results = pool.map(lambda part: solver.solve_batch(questions[part], box).counts, parts)
        for part, counts in zip(parts, results, strict=True):
            ambiguous: Fault = counts != 1, lambda i: "question has more than one solution, expected exactly one"
            _check(path, lines[part], [ambiguous])
            if progress:
                progress(len(counts))


def download() -> tuple[Path, Path]:
    """Sudoku-Extreme's train.csv and test.csv from the Hugging Face hub or its cache."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise DataError(f"{HUB_REPO} needs huggingface_hub: pip install 'tinypod[hub]'") from error
    try:
        train, test = (hf_hub_download(HUB_REPO, f"{split}.csv", repo_type="dataset") for split in ("train", "test"))
    except Exception as error:  # the hub's HTTP libraries share no base class
        raise DataError(
            f"{HUB_REPO} cannot be downloaded ({type(error).__name__}: {error}); "
            "pass local CSV files, or generate puzzles"
        ) from error
    return Path(train), Path(test)
