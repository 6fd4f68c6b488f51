"""What a model solves of Sudokus by how hard they are: by the cells that trials of single digits leave open.

    python benchmarks/sudoku_hardness.py data/sudoku_varied --model sudoku --splits holdout train --limit 200

A row for each source in a split, and for each range of open cells, in Markdown: puzzles, their share, the guesses of
our solver at the median one, and with `--model` (a run, a release or the name of one) the share solved in as many
steps as in training. 200 puzzles take a release of 256 channels about a minute on two CPU cores.
"""

import argparse
from pathlib import Path

import numpy as np

import tinypod
from tinypod.data import puzzles, sudoku, sudoku_solver

RANGES = ((0, 0), (1, 45), (46, 54), (55, 256))  # cells open after trials; 0: they solve the puzzle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--splits", nargs="+", default=["holdout"])
    parser.add_argument("--limit", type=int, help="puzzles of each source in a split, the first ones")
    options = parser.parse_args()
    info = puzzles.read_info(options.data)
    assert info.box is not None, "only Sudokus are hard in this way"
    box = (info.box[0], info.box[1])
    model = tinypod.load(options.model) if options.model else None
    print("| split | source | open cells | puzzles | share | guesses | solved |\n|---|---|---|---|---|---|---|")
    for name in options.splits:
        split = puzzles.read_split(options.data, info, name)
        for number in np.unique(split.sources):
            grids = sudoku.to_digits(split.inputs[split.sources == number][: options.limit])
            left, guesses = sudoku_solver.open_after_trials(grids, box), sudoku_solver.solve_batch(grids, box).guesses
            solved = None
            if model is not None:
                texts = ["".join(sudoku.SYMBOLS[digit] for digit in grid) for grid in grids]
                solved = np.array([refined.solved for refined in model.solve_all(texts)])
            for low, high in RANGES:
                here = (low <= left) & (left <= high)
                if not here.any():
                    continue
                told = "" if solved is None else f"{solved[here].mean():.1%}"
                cells = f"{low} to {high}" if high else "none"
                row = (
                    name,
                    info.sources[number],
                    cells,
                    here.sum(),
                    f"{here.mean():.1%}",
                    np.median(guesses[here]),
                    told,
                )
                print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
