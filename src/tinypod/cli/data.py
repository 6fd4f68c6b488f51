"""`tinypod data`."""

from pathlib import Path
from typing import Annotated

import typer

from tinypod.cli.shared import console, data_app


@data_app.command("sudoku")
def data_sudoku(
    out: Annotated[Path, typer.Argument(help="The dataset folder to make.")],
    train_csv: Annotated[Path | None, typer.Option("--train-csv", help="The official train.csv.")] = None,
    test_csv: Annotated[Path | None, typer.Option("--test-csv", help="The official test.csv.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Make puzzles up instead of reading them.")] = False,
    train_size: Annotated[
        int, typer.Option("--train-size", min=1, help="Training puzzles, drawn with the seed.")
    ] = 1000,
    test_size: Annotated[
        int | None,
        typer.Option("--test-size", min=1, help="Held-out puzzles; default: all there are, or 1000 made up."),
    ] = None,
    holdout: Annotated[
        int,
        typer.Option(
            min=0, help="More puzzles from where those for training come from: a split `holdout` of this many."
        ),
    ] = 0,
    variants: Annotated[
        int,
        typer.Option(
            min=0,
            max=10_000,
            help="Up to this many more training puzzles near each: other clues, other answers, about as hard.",
        ),
    ] = 0,
    box: Annotated[
        str, typer.Option(help="Rows x columns of a box: 3x3 is the usual 9×9, 2x3 a 6×6, 2x2 a 4×4.")
    ] = "3x3",
    clues: Annotated[
        str | None,
        typer.Option(
            help="With --generate: at least this many clues, or a range like 24-36; default: as few as can be."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the subsample, or the puzzles made up.")] = 0,
) -> None:
    """Sudoku puzzles with exactly one solution each.

    From the Hugging Face hub (Sudoku-Extreme), from local CSVs with `--train-csv` and `--test-csv`, or made up with
    `--generate`. Rows that are no valid puzzle are refused with their line number.

    Examples: `tinypod data sudoku data/sudoku --train-size 1000` ·
    `tinypod data sudoku data/small --generate --box 2x2 --clues 6 --train-size 200 --test-size 100`
    """
    from tinypod.data import build

    info = build.build_sudoku(
        out,
        train_csv=train_csv,
        test_csv=test_csv,
        generate=generate,
        train_size=train_size,
        test_size=test_size,
        holdout=holdout,
        variants=variants,
        box=build.parse_box(box),
        clues=None if clues is None else build.parse_clues(clues),
        seed=seed,
        console=console,
    )
    build.describe(out, info, console)


@data_app.command("import")
def data_import(
    folder: Annotated[Path, typer.Argument(help="A folder that the TRM authors' scripts made (train/, test/).")],
    out: Annotated[Path, typer.Argument(help="The dataset folder to make.")],
) -> None:
    """Read the TRM authors' converted datasets (`train/all__inputs.npy` and so on)."""
    from tinypod.data import authors, build, puzzles

    info, splits = authors.import_folder(folder)
    build.describe(out, puzzles.write_dataset(out, info, splits), console)
