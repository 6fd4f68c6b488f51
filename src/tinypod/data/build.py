"""Datasets from CSVs, from the hub, from the generator: what `tinypod data sudoku` does."""

import re
from pathlib import Path

import numpy as np
from rich.console import Console

from tinypod.data import puzzles, sudoku, sudoku_csv
from tinypod.data.views import SUDOKU_FIRST_DIGIT
from tinypod.errors import DataError, UserError
from tinypod.runs.terminal import counting, say

SMALL = 6  # the side of grids that need no compiled solver


def parse_box(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise UserError(f"--box {text}: expected rows x columns of a box, like 3x3 or 2x3")
    return int(match[1]), int(match[2])


def build_sudoku(
    out: Path,
    *,
    train_csv: Path | None,
    test_csv: Path | None,
    generate: bool,
    train_size: int,
    test_size: int | None,
    box: tuple[int, int],
    clues: int | None,
    seed: int,
    console: Console,
) -> puzzles.DatasetInfo:
    """Make a dataset folder: generated, or from CSVs (local ones, or the hub's)."""
    if (out / "dataset.json").exists():
        raise DataError(f"{out} already holds a dataset; remove it first or choose another folder")
    if generate and (train_csv or test_csv):
        raise UserError("--generate makes puzzles up: leave out --train-csv and --test-csv, or --generate")
    if clues is not None and not generate:
        raise UserError("--clues goes with --generate only: puzzles that are read keep their clues")
    if (train_csv is None) != (test_csv is None):
        raise UserError("give both --train-csv and --test-csv, or neither")
    _warn_if_slow(box, console)
    if generate:
        test_size = test_size or 1000
        train, test = _generate(box, train_size, test_size, clues, seed, console)
        origin = f"generated: box {box[0]}x{box[1]}, clues {clues or 'minimal'}, seed {seed}"
    else:
        if train_csv is None or test_csv is None:
            downloaded = sudoku_csv.download()
            train_csv, test_csv = downloaded["train"], downloaded["test"]
        train = _read(train_csv, box, train_size, seed, console)
        test = _read(test_csv, box, test_size, seed, console)
        origin = f"read from CSV: {len(train.questions)} training rows drawn with seed {seed}"
    copies = np.isin(sudoku.signatures(test.questions, box), sudoku.signatures(train.questions, box)).sum()
    if copies:
        say(console, f"note: {copies} held-out puzzles look like symmetric copies of training puzzles", "yellow")
    info, splits = _to_splits(train, test, box, origin, seed)
    return puzzles.write_dataset(out, info, splits)


def describe(out: Path, info: puzzles.DatasetInfo, console: Console) -> None:
    sizes = ", ".join(f"{split.rows:,} {name}" for name, split in info.splits.items())
    say(console, f"{out}: {info.kind} puzzles of {info.seq_len} cells ({sizes})")


def _warn_if_slow(box: tuple[int, int], console: Console) -> None:
    from tinypod.data import sudoku_solver

    side = sudoku.side_of(box)
    if not sudoku_solver.COMPILED and side > SMALL:
        say(
            console,
            f"note: numba is not installed: making and proving {side}x{side} puzzles takes some 50 times as long, "
            "hours for millions of them; pip install 'tinypod[sudoku]' compiles the solver",
            "yellow",
        )


def _generate(
    box: tuple[int, int], train_size: int, test_size: int, clues: int | None, seed: int, console: Console
) -> tuple[sudoku.Puzzles, sudoku.Puzzles]:
    """Both splits in one go: no two puzzles are symmetric copies of each other."""
    total = train_size + test_size
    with counting(console, "generating", total) as progress:
        made = sudoku.generate(box, total, seed, clues, progress=progress)

    def part(rows: slice) -> sudoku.Puzzles:
        return sudoku.Puzzles(made.questions[rows], made.answers[rows], made.sources[rows], made.ratings[rows])

    return part(slice(train_size)), part(slice(train_size, None))


def _read(path: Path, box: tuple[int, int], size: int | None, seed: int, console: Console) -> sudoku.Puzzles:
    with counting(console, "proving", size) as progress:
        return sudoku_csv.read_csv(path, box, subsample=size, seed=seed, progress=progress)


def _to_splits(
    train: sudoku.Puzzles, test: sudoku.Puzzles, box: tuple[int, int], origin: str, seed: int
) -> tuple[puzzles.DatasetInfo, dict[str, puzzles.Split]]:
    """Tokens and source numbers, in a seeded order: the first rows of a split are a fair sample of it."""
    side = box[0] * box[1]
    sources = sorted({*train.sources, *test.sources})
    info = puzzles.DatasetInfo(
        kind="sudoku",
        seq_len=side * side,
        vocab_size=side + SUDOKU_FIRST_DIGIT,
        num_identifiers=1,
        box=list(box),
        sources=sources,
        origin=origin,
    )
    numbers = {name: i for i, name in enumerate(sources)}

    def split(part: sudoku.Puzzles) -> puzzles.Split:
        order = np.random.default_rng(seed).permutation(len(part.questions))
        return puzzles.Split(
            inputs=(part.questions[order] + (SUDOKU_FIRST_DIGIT - 1)).astype(np.uint8),
            labels=(part.answers[order] + (SUDOKU_FIRST_DIGIT - 1)).astype(np.uint8),
            identifiers=np.zeros(len(order), np.int32),
            sources=np.array([numbers[name] for name in part.sources], np.uint16)[order],
            ratings=part.ratings[order].astype(np.int32),
        )

    return info, {"train": split(train), "test": split(test)}
