"""`tinypod solve`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from tinypod.cli.shared import CheckpointOption, HaltSteps, RunFolder, UseOverrides, WeightsOption, app, console
from tinypod.errors import UserError


@app.command()
def solve(
    run: RunFolder,
    puzzle: Annotated[
        str | None,
        typer.Argument(help="A puzzle in characters (`.` blank), or a file of them, one per line; default: held-out."),
    ] = None,
    overrides: UseOverrides = None,
    checkpoint: CheckpointOption = "best",
    weights: WeightsOption = None,
    halt_steps: HaltSteps = None,
    every: Annotated[int, typer.Option(min=1, help="Show every Nth step.")] = 1,
    number: Annotated[
        int | None,
        typer.Option(min=0, help="Which held-out puzzle, when none is given; default: one first wrong, then refined."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Also draw the (first) answer into this SVG file, in one row.")
    ] = None,
) -> None:
    """Show an answer being refined step by step, and when the model itself would have stopped.

    A puzzle that is given needs nothing but the run folder, on any machine. A held-out one needs the dataset.
    """
    from tinypod import api
    from tinypod.solve import display, picture, stops

    if svg is not None and not svg.parent.is_dir():  # before computing anything
        raise UserError(f"--svg {svg}: there is no folder {svg.parent}")
    changes = list(overrides or [])
    if puzzle is not None and "=" in puzzle and not os.path.exists(puzzle):  # `solve RUN model.dtype=float32`
        changes, puzzle = [puzzle, *changes], None
    model = api.Model(run, changes, checkpoint, weights, console)
    if puzzle is not None:
        refinements = model.solve_all(puzzle, halt_steps=halt_steps)
    elif number is not None:
        refinements = [model.solve(number=number, halt_steps=halt_steps)]
    else:
        refinements = model.solve_held_out(halt_steps=halt_steps)
        chosen, why = stops.most_telling(refinements)
        console.print(f"Of the first {len(refinements)} held-out puzzles, number {chosen}: {why}.", highlight=False)
        refinements = [refinements[chosen]]
    for refinement in refinements:
        console.print(display.render_refinement(refinement, every))
    if len(refinements) > 1:
        console.print(f"solved {sum(r.solved for r in refinements)} of {len(refinements)}", highlight=False)
    if svg is not None:
        svg.write_text(picture.draw_svg(refinements[0]), encoding="utf-8")
