"""Datasets from CSVs, from the hub, from the generator: what `tinypod data sudoku` does."""

import re
import shutil
from pathlib import Path

import numpy as np
from rich.console import Console

from tinypod.data import puzzles, sudoku, sudoku_csv
from tinypod.data.sudoku import Box, Clues, Puzzles
from tinypod.errors import UserError
from tinypod.runs.terminal import counting, say

SMALL = 6  # the side of grids that need no compiled solver
VARIANTS = "variants.partial"  # in a dataset's folder until it is whole: what was made so far


def parse_box(text: str) -> Box:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise UserError(f"--box {text}: expected rows x columns of a box, like 3x3 or 2x3")
    return int(match[1]), int(match[2])


def parse_clues(text: str) -> Clues:
    match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    if not match:
        raise UserError(f"--clues {text}: expected a number, like 30, or a range, like 24-36")
    return int(match[1]), int(match[2] or match[1])


def build_sudoku(
    out: Path,
    *,
    train_csv: Path | None,
    test_csv: Path | None,
    generate: bool,
    train_size: int,
    test_size: int | None,
    box: Box,
    clues: Clues | None,
    seed: int,
    console: Console,
    holdout: int = 0,
    variants: int = 0,
) -> puzzles.DatasetInfo:
    """Make a dataset folder: generated, or from CSVs (local ones, or the hub's). `holdout`: so many more puzzles from
    where those for training come from, as a split of that name. `variants`: up to so many more near each of
    these, about as hard."""
    puzzles.check_new(out)
    if generate and (train_csv or test_csv):
        raise UserError("--generate makes puzzles up: leave out --train-csv and --test-csv, or --generate")
    if clues is not None and not generate:
        raise UserError("--clues goes with --generate only: puzzles that are read keep their clues")
    cells = sudoku.side_of(box) ** 2
    if clues is not None and clues[0] > clues[1]:
        raise UserError(f"--clues {_text(clues)}: the first number is the larger one; write {clues[1]}-{clues[0]}")
    if clues is not None and clues[1] >= cells:
        raise UserError(
            f"--clues {_text(clues)}: with --box {box[0]}x{box[1]} a grid has {cells} cells; "
            f"expected at most {cells - 1}"
        )
    if (train_csv is None) != (test_csv is None):
        raise UserError("give both --train-csv and --test-csv, or neither")
    _warn_if_slow(box, console)
    parts = {}
    if generate:
        sizes = {"train": train_size, "test": test_size or 1000, "holdout": holdout}
        parts = _generate(box, sizes, clues, seed, console)
        origin = generated(box, clues, seed, holdout)
    else:
        files = (train_csv, test_csv) if train_csv and test_csv else sudoku_csv.download()
        parts["train"] = _read(files[0], box, train_size, seed, console)
        parts["test"] = _read(files[1], box, test_size, seed, console)
        if holdout:
            parts["holdout"] = _read(files[0], box, holdout, seed, console, besides=train_size)
        origin = f"read from CSV: {train_size} training rows drawn with seed {seed}{_more(holdout)}"
    trained = sudoku.signatures(parts["train"].questions, box)
    unseen = sudoku.signatures(np.concatenate([part.questions for name, part in parts.items() if name != "train"]), box)
    if copies := np.isin(unseen, trained).sum():
        say(console, f"note: {copies} held-out puzzles look like symmetric copies of training puzzles", "yellow")
    if variants:
        more = _vary(out, parts["train"], box, variants, seed, unseen, console)
        parts["train"] = sudoku.join(parts["train"], more)
        origin += varied(len(more.questions), variants)
    sources = sorted({source for part in parts.values() for source in part.sources})
    info = puzzles.describe_sudoku(list(box), sources=sources, origin=origin)
    splits = {name: _to_split(part, info.sources, seed) for name, part in parts.items()}
    info = puzzles.write_dataset(out, info, splits)
    shutil.rmtree(out / VARIANTS, ignore_errors=True)
    return info


def generated(box: Box, clues: Clues | None, seed: int, holdout: int = 0) -> str:
    """The origin of a dataset that was made up."""
    asked = _text(clues) if clues and clues[1] else "minimal"
    return f"generated: box {box[0]}x{box[1]}, clues {asked}, seed {seed}{_more(holdout)}"


def varied(count: int, most: int) -> str:
    """What the variants add to it."""
    return f"; {count} variants of them, at most {most} each"


def _text(clues: Clues) -> str:
    return str(clues[0]) if clues[0] == clues[1] else f"{clues[0]}-{clues[1]}"


def _more(holdout: int) -> str:
    return f"; {holdout} more held out" if holdout else ""


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


def _generate(box: Box, sizes: dict[str, int], clues: Clues | None, seed: int, console: Console) -> dict[str, Puzzles]:
    """All splits in one go, one after the other: no two puzzles are symmetric copies of each other."""
    from tinypod.data import sudoku_generator

    total = sum(sizes.values())
    with counting(console, "generating", total) as progress:
        made = sudoku_generator.generate(box, total, seed, clues, progress)
    parts, start = {}, 0
    for name, size in sizes.items():
        if size:
            parts[name] = Puzzles(*(column[start : start + size] for column in made))  # type: ignore[arg-type]
        start += size
    return parts


def _vary(out: Path, part: Puzzles, box: Box, most: int, seed: int, unseen: np.ndarray, console: Console) -> Puzzles:
    from tinypod.data import sudoku_variants

    try:
        with counting(console, "varying", len(part.questions)) as progress:
            return sudoku_variants.make_variants(part, box, most, seed, unseen, progress, out / VARIANTS)
    except KeyboardInterrupt:
        say(
            console,
            f"stopped; the variants made so far are kept in {out / VARIANTS}: run it again to resume",
        )
        raise


def _read(path: Path, box: Box, size: int | None, seed: int, console: Console, besides: int = 0) -> Puzzles:
    with counting(console, "proving", size) as progress:
        return sudoku_csv.read_csv(path, box, size, seed, progress, besides)


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
