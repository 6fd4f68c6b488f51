"""`tinypod solve`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from tinypod.cli import shared
from tinypod.cli.shared import app, console
from tinypod.errors import UserError


@app.command()
def solve(
    run: shared.Trained,
    puzzle: Annotated[
        str | None,
        typer.Argument(help="A puzzle in characters (`.` blank), or a file of them, one per line; default: held-out."),
    ] = None,
    overrides: shared.UseOverrides = None,
    checkpoint: shared.CheckpointOption = "best",
    weights: shared.WeightsOption = None,
    halt_steps: shared.HaltSteps = None,
    views: shared.Views = None,
    trajectories: shared.Trajectories = None,
    noise: shared.Noise = None,
    noise_at: shared.NoiseAt = None,
    choose: shared.Choose = None,
    every: Annotated[int, typer.Option(min=1, help="Show every Nth step.")] = 1,
    number: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Which held-out puzzle or example, when none is given; default: one first wrong, then refined.",
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Also draw the (first) answer into this SVG file, in one row.")
    ] = None,
) -> None:
    """Show an answer being refined step by step, and when the model itself would have stopped.

    A puzzle that is given needs nothing but the run folder, on any machine. A held-out one needs the dataset.

    RUN may be a release, a file that `tinypod weights export --format release` wrote: `tinypod solve FILE.safetensors
    PUZZLE`; or the name of one that comes with tinypod. Without a puzzle it shows one of its examples.
    """
    from tinypod import api
    from tinypod.runs.load import names_data
    from tinypod.solve import display, examples, picture, stops

    if svg is not None and not svg.parent.is_dir():  # before computing anything
        raise UserError(f"--svg {svg}: there is no folder {svg.parent}")
    changes = list(overrides or [])
    if puzzle is not None and "=" in puzzle and not os.path.exists(puzzle):  # `solve RUN model.dtype=float32`
        changes, puzzle = [puzzle, *changes], None
    thinking = api.Thinking(
        halt_steps=halt_steps, views=views, trajectories=trajectories, noise=noise, noise_at=noise_at, choose=choose
    )
    model = api.Model(run, changes, checkpoint, weights, console)
    if puzzle is not None:
        refinements = model.solve_all(puzzle, **thinking)
    elif model.release is not None and not names_data(changes):
        question = examples.example(model.release, number or 0)
        console.print(examples.introduce(model.release, number or 0), highlight=False, markup=False, soft_wrap=True)
        refinements = model.solve_all([question], **thinking)
    elif number is not None:
        refinements = [model.solve(number=number, **thinking)]
    else:
        refinements = model.solve_held_out(**thinking)
        chosen, why = stops.most_telling(refinements)
        console.print(f"Of the first {len(refinements)} held-out puzzles, number {chosen}: {why}.", highlight=False)
        refinements = [refinements[chosen]]
    for refinement in refinements:
        console.print(display.render_refinement(refinement, every))
    if more := shared.describe_thinking(thinking):
        costs = [refinement.cost or 0 for refinement in refinements]
        mean = f"{sum(costs) / len(costs):,.1f}".removesuffix(".0")
        console.print(f"{', '.join(more)}: {mean} steps of the model for a puzzle", highlight=False)
    if len(refinements) > 1:
        console.print(f"solved {sum(r.solved for r in refinements)} of {len(refinements)}", highlight=False)
    if svg is not None:
        svg.write_text(picture.draw_svg(refinements[0]), encoding="utf-8")
