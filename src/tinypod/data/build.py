"""Datasets from CSVs, from the hub, from the generator: what `tinypod data sudoku` does."""

import re
from pathlib import Path

import numpy as np
from rich.console import Console

from tinypod.data import puzzles, sudoku, sudoku_csv
from tinypod.data.sudoku import Box, Puzzles
from tinypod.errors import UserError
from tinypod.runs.terminal import counting, say

SMALL = 6  # the side of grids that need no compiled solver


def parse_box(text: str) -> Box:
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
    box: Box,
    clues: int | None,
    seed: int,
    console: Console,
    holdout: int = 0,
) -> puzzles.DatasetInfo:
    """Make a dataset folder: generated, or from CSVs (local ones, or the hub's). `holdout`: puzzles of where those for
    training come from, drawn with them and kept out, as a split of that name."""
    puzzles.check_new(out)
    if generate and (train_csv or test_csv):
        raise UserError("--generate makes puzzles up: leave out --train-csv and --test-csv, or --generate")
    if clues is not None and not generate:
        raise UserError("--clues goes with --generate only: puzzles that are read keep their clues")
    cells = sudoku.side_of(box) ** 2
    if clues is not None and clues >= cells:
        raise UserError(
            f"--clues {clues}: with --box {box[0]}x{box[1]} a grid has {cells} cells; expected at most {cells - 1}"
        )
    if (train_csv is None) != (test_csv is None):
        raise UserError("give both --train-csv and --test-csv, or neither")
    _warn_if_slow(box, console)
    drawn = train_size + holdout
    if generate:
        train, test = _generate(box, drawn, test_size or 1000, clues, seed, console)
        origin = generated(box, clues, seed)
    else:
        files = (train_csv, test_csv) if train_csv and test_csv else sudoku_csv.download()
        train, test = (
            _read(path, box, size, seed, console) for path, size in zip(files, (drawn, test_size), strict=True)
        )
        origin = f"read from CSV: {train_size} training rows drawn with seed {seed}"
    parts = {"train": train, "test": test}
    if holdout:
        # Another stream than the one that orders a split: its own seed.
        order = np.random.default_rng([seed, 1]).permutation(drawn)
        parts |= {"train": _take(train, order[:train_size]), "holdout": _take(train, order[train_size:])}
        origin = f"{origin}; {holdout} more held out"
    trained = sudoku.signatures(parts["train"].questions, box)
    unseen = [part.questions for name, part in parts.items() if name != "train"]
    if copies := np.isin(sudoku.signatures(np.concatenate(unseen), box), trained).sum():
        say(console, f"note: {copies} held-out puzzles look like symmetric copies of training puzzles", "yellow")
    info = puzzles.describe_sudoku(list(box), sources=sorted({*train.sources, *test.sources}), origin=origin)
    splits = {name: _to_split(part, info.sources, seed) for name, part in parts.items()}
    return puzzles.write_dataset(out, info, splits)


def generated(box: Box, clues: int | None, seed: int) -> str:
    """The origin of a dataset that was made up."""
    return f"generated: box {box[0]}x{box[1]}, clues {clues or 'minimal'}, seed {seed}"


def describe(out: Path, info: puzzles.DatasetInfo, console: Console) -> None:
    sizes = ", ".join(f"{split.rows:,} {name}" for name, split in info.splits.items())
    say(console, f"{out}: {info.kind} puzzles of {info.seq_len} cells ({sizes})")


def _warn_if_slow(box: Box, console: Console) -> None:
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
    box: Box, train_size: int, test_size: int, clues: int | None, seed: int, console: Console
) -> list[Puzzles]:
    """Both splits in one go: no two puzzles are symmetric copies of each other."""
    from tinypod.data import sudoku_generator

    total = train_size + test_size
    with counting(console, "generating", total) as progress:
        made = sudoku_generator.generate(box, total, seed, clues, progress)
    return [_take(made, np.arange(total)[part]) for part in (slice(train_size), slice(train_size, None))]


def _take(made: Puzzles, rows: np.ndarray) -> Puzzles:
    return Puzzles(made.questions[rows], made.answers[rows], [made.sources[i] for i in rows], made.ratings[rows])


def _read(path: Path, box: Box, size: int | None, seed: int, console: Console) -> Puzzles:
    with counting(console, "proving", size) as progress:
        return sudoku_csv.read_csv(path, box, size, seed, progress)


def _to_split(part: Puzzles, sources: list[str], seed: int) -> puzzles.Split:
    """Tokens and source numbers, in a seeded order: the first rows of a split are a fair sample of it."""
    order = np.random.default_rng(seed).permutation(len(part.questions))
    numbers = {name: i for i, name in enumerate(sources)}
    return puzzles.Split(
        inputs=sudoku.to_tokens(part.questions[order]),
        labels=sudoku.to_tokens(part.answers[order]),
        identifiers=np.zeros(len(order), np.int32),
        sources=np.array([numbers[name] for name in part.sources], np.uint16)[order],
        ratings=part.ratings[order],
    )
