"""What variants of Sudokus cost and how far they lead away, by how hard the puzzle is that they are made of.

    python benchmarks/sudoku_variants.py data/sudoku --variants 60 --puzzles 12

A row for each range of cells that trials leave open, in Markdown: puzzles, variants of each, one core's time for a
variant, clues of the first puzzle that a variant does not have, and how many of the variants trials solve, and leave
more than 54 cells open in. Of the training split, without the variants that it may have already. The example takes a
minute.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from sudoku_hardness import RANGES
from tinypod.data import puzzles, sudoku, sudoku_solver, sudoku_variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--variants", type=int, default=60, help="of each puzzle")
    parser.add_argument("--puzzles", type=int, default=12, help="of each range, the first ones")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    info = puzzles.read_info(options.data)
    assert info.box is not None, "only Sudokus have such variants"
    box = (info.box[0], info.box[1])
    split = puzzles.read_split(options.data, info, "train")
    own = [number for number, source in enumerate(info.sources) if not source.endswith("_variant")]
    grids = sudoku.to_digits(split.inputs[np.isin(split.sources, own)])
    left, most = sudoku_solver.open_after_trials(grids, box), options.variants
    sudoku_solver.wander(grids[0], box, 0, 1, sudoku_variants.ATTEMPTS)  # compiles
    print("| open cells | puzzles | variants of each | ms each | clues gone | trials solve | over 54 open |")
    print("|---|---|---|---|---|---|---|")
    for low, high in RANGES:
        these = grids[(low <= left) & (left <= high)][: options.puzzles]
        if not len(these):
            continue
        start = time.perf_counter()
        walks = [
            sudoku_solver.wander(grid, box, options.seed, most, sudoku_variants.ATTEMPTS * most)[0] for grid in these
        ]
        took_s = time.perf_counter() - start
        made = np.concatenate(walks)
        gone = [((grid > 0) & (walk != grid)).sum(1) for grid, walk in zip(these, walks, strict=True)]
        still = sudoku_solver.open_after_trials(made, box)
        row = (
            f"{low} to {high}" if high else "none",
            len(these),
            f"{len(made) / len(these):.1f}",
            f"{1e3 * took_s / max(len(made), 1):.2f}",
            f"{np.concatenate(gone).mean():.1f}",
            f"{(still == 0).mean():.0%}",
            f"{(still > 54).mean():.0%}",
        )
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
