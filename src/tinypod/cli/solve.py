"""`tinypod solve`."""

from pathlib import Path
from typing import Annotated

import typer

from tinypod.cli.shared import CheckpointOption, HaltSteps, RunFolder, WeightsOption, app, console, thinking
from tinypod.errors import UserError


@app.command()
def solve(
    run: RunFolder,
    puzzle: Annotated[
        str | None,
        typer.Argument(help="A puzzle in characters (`.` blank), or a file of them, one per line; default: held-out."),
    ] = None,
    checkpoint: CheckpointOption = "best",
    weights: WeightsOption = None,
    halt_steps: HaltSteps = None,
    every: Annotated[int, typer.Option(min=1, help="Show every Nth step.")] = 1,
    number: Annotated[
        int | None, typer.Option(min=0, help="Which held-out puzzle, when none is given; default: one that takes long.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the (first) answer into this SVG file.")] = None,
) -> None:
    """Show an answer being refined step by step, and when the model itself would have stopped."""
    from tinypod.runs.folder import open_run
    from tinypod.runs.load import load_weights
    from tinypod.solve import display, refine

    if svg is not None and not svg.parent.is_dir():  # before computing anything
        raise UserError(f"--svg {svg}: there is no folder {svg.parent}")
    loaded = load_weights(open_run(run), thinking(halt_steps), checkpoint, weights)
    refinements = refine.refinements(loaded.experiment, loaded.params, puzzle, number)
    for refinement in refinements:
        console.print(display.render_refinement(refinement, every))
    if len(refinements) > 1:
        console.print(f"solved {sum(r.solved for r in refinements)} of {len(refinements)}", highlight=False)
    if svg is not None:
        display.save_svg(refinements[0], svg, every)
