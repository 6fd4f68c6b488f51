"""Commands that use a trained model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tinypod.cli.shared import CheckpointOption, Overrides, RunFolder, WeightsOption, app, console, errors


@app.command("eval")
def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = "best",
    weights: WeightsOption = None,
    halt_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to think, e.g. 64; default: as in training.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="The split; default: the config's data.eval_split.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a run on a whole split: every puzzle exactly once.

    Another dataset: `tinypod eval RUN data.path=FOLDER`. More thinking than in training: `--halt-steps 64`.
    """
    import json

    from tinypod.evaluate import Evaluator
    from tinypod.runs import folder as runs
    from tinypod.runs.terminal import counting
    from tinypod.step import evaluation_params

    experiment, state = runs.load_state(runs.open_run(run), overrides or [], checkpoint)
    config = experiment.config
    weights = weights or config.eval.weights
    rows = experiment.read_split(split or config.data.eval_split)
    evaluator = Evaluator(experiment, rows, config.eval.batch_size, halt_steps, limit)
    with counting(errors if as_json else console, "evaluating", evaluator.rows) as progress:
        scores = evaluator(evaluation_params(state, weights), progress)
    steps = halt_steps or config.task.halting.max_steps
    if as_json:
        described = {"step": int(state.step), "weights": weights, "halt_steps": steps, **scores}
        print(json.dumps(described))
        return
    table = Table(
        title=f"{run}, step {int(state.step)}, {weights} weights, {steps} steps a puzzle",
        title_justify="left",
    )
    for name in ("source", "puzzles", "exact", "cells", "halting", "mean steps"):
        table.add_column(name, justify="left" if name == "source" else "right")
    sources = [name.removeprefix("puzzles/") for name in scores if name.startswith("puzzles/")]
    for source in [*sources, None]:
        end = f"/{source}" if source else ""
        table.add_row(
            source or "all",
            f"{scores['puzzles' + end]:,.0f}",
            *(f"{scores[name + end]:.2%}" for name in ("exact_accuracy", "cell_accuracy", "halt_accuracy")),
            f"{scores['steps' + end]:.2f}",
        )
    console.print(table)


@app.command()
def solve(
    run: RunFolder,
    puzzle: Annotated[
        str | None,
        typer.Argument(help="A puzzle in characters (`.` blank), or a file with one a line; default: a held-out one."),
    ] = None,
    checkpoint: CheckpointOption = "best",
    weights: WeightsOption = None,
    halt_steps: Annotated[int | None, typer.Option(min=1, help="Steps to think; default: as in training.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Show each so-many-th step.")] = 1,
    number: Annotated[
        int | None, typer.Option(min=0, help="Which held-out puzzle, when none is given; default: one that takes long.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the (first) answer into this SVG file.")] = None,
) -> None:
    """Show an answer being refined step by step, and when the model itself would have stopped."""
    from tinypod.runs import folder as runs
    from tinypod.solve import display
    from tinypod.solve import refine as solve
    from tinypod.step import evaluation_params

    experiment, state = runs.load_state(runs.open_run(run), [], checkpoint)
    weights = weights or experiment.config.eval.weights
    refinements = solve.refinements(experiment, evaluation_params(state, weights), puzzle, number, halt_steps)
    for refinement in refinements:
        console.print(display.render_refinement(refinement, every))
    if len(refinements) > 1:
        console.print(f"solved {sum(r.solved for r in refinements)} of {len(refinements)}", highlight=False)
    if svg is not None:
        display.save_svg(refinements[0], svg, every)
