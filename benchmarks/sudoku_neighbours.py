"""Has a held-out Sudoku a neighbour among those that are trained on: the same up to symmetry, but for a clue or two?

    python benchmarks/sudoku_neighbours.py data/sudoku_varied --splits holdout test

Two puzzles are neighbours if they share a signature once some clue of each is taken away, or some two. Prints how many
held-out puzzles of each split have one, by the source of the puzzles that are trained on. Two clues of 13 000
puzzles and 8 200 held-out ones take about a minute.
"""

import argparse
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np

from tinypod.data import puzzles, sudoku

AT_ONCE = 100  # puzzles


def signatures_without(grids: np.ndarray, box: sudoku.Box, clues: int) -> Iterator[tuple[int, np.ndarray]]:
    """The number of each puzzle, and the signatures of what is left of it without any so many of its clues."""
    for start in range(0, len(grids), AT_ONCE):
        left, counts = [], []
        for grid in grids[start : start + AT_ONCE]:
            taken = np.array(list(combinations(np.flatnonzero(grid), clues)), int)
            rows = np.repeat(grid[None], len(taken), axis=0)
            rows[np.arange(len(taken))[:, None], taken] = 0
            left.append(rows)
            counts.append(len(taken))
        marks = sudoku.signatures(np.concatenate(left), box)
        yield from zip(range(start, start + len(counts)), np.split(marks, np.cumsum(counts)[:-1]), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--splits", nargs="+", default=["test"])
    parser.add_argument("--limit", type=int, help="puzzles of each split")
    options = parser.parse_args()
    info = puzzles.read_info(options.data)
    assert info.box is not None, "only Sudokus have signatures"
    box = (info.box[0], info.box[1])
    splits = {name: puzzles.read_split(options.data, info, name) for name in ["train", *options.splits]}
    grids = {name: sudoku.to_digits(split.inputs) for name, split in splits.items()}
    names = np.array(info.sources)[splits["train"].sources]
    print("| clues that differ | trained on | split | held out | with a neighbour |\n|---|---|---|---|---|")
    for clues in (0, 1, 2):
        for source in sorted(set(names.tolist())):
            known = np.concatenate(
                [marks for _, marks in signatures_without(grids["train"][names == source], box, clues)]
            )
            known = np.unique(known)
            for split in options.splits:
                held_out = grids[split][: options.limit]
                near = sum(
                    (known[np.searchsorted(known[:-1], marks)] == marks).any()
                    for _, marks in signatures_without(held_out, box, clues)
                )
                told = f"{(names == source).sum():,} {source}"
                print(f"| {clues} | {told} | {split} | {len(held_out):,} | {near} |", flush=True)


if __name__ == "__main__":
    main()
