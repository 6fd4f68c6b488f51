"""`tinypod eval`."""

from typing import Annotated

import typer

from tinypod.cli import shared
from tinypod.cli.shared import app, console, errors


@app.command("eval")
def evaluate(
    run: shared.RunFolder,
    overrides: shared.Overrides = None,
    checkpoint: shared.CheckpointOption = "best",
    weights: shared.WeightsOption = None,
    halt_steps: shared.HaltSteps = None,
    split: Annotated[str | None, typer.Option(help="The split; default: the config's data.eval_split.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a run on a whole split: every row exactly once.

    Another dataset: `tinypod eval RUN data.path=FOLDER`. More thinking than in training: `--halt-steps 64`.
    """
    import json

    from tinypod import api
    from tinypod.runs.report import scores_table
    from tinypod.runs.terminal import say

    model = api.Model(run, overrides or [], checkpoint, weights, errors if as_json else console)
    scores = model.evaluate(split, limit=limit, halt_steps=halt_steps)
    if as_json:
        print(json.dumps({"step": model.step, "weights": model.weights, **scores}))
        return
    more = f", {halt_steps} steps each" if halt_steps else ""
    title = f"{run}, step {model.step:,}, {model.weights} weights{more}"
    task = model.loaded(halt_steps).experiment.task
    console.print(scores_table(title, task, scores))
    say(console, task.description)
