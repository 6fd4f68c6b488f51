"""`tinypod eval`."""

from typing import Annotated

import typer

from tinypod.cli import shared
from tinypod.cli.shared import app, console, errors, thinking


@app.command("eval", cls=shared.TakesOverrides)
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

    from tinypod.evaluate import Evaluator
    from tinypod.runs.folder import open_run
    from tinypod.runs.load import load_weights
    from tinypod.runs.report import scores_table
    from tinypod.runs.terminal import counting, say

    loaded = load_weights(open_run(run), [*(overrides or []), *thinking(halt_steps)], checkpoint, weights)
    experiment, config = loaded.experiment, loaded.experiment.config
    evaluation = experiment.task.open_evaluation(split)
    evaluator = Evaluator(evaluation, experiment.mesh, experiment.specs, config.eval.batch_size, limit)
    with counting(errors if as_json else console, "evaluating", evaluator.rows) as progress:
        scores = evaluator(loaded.params, progress)
    if as_json:
        print(json.dumps({"step": loaded.step, "weights": loaded.weights, **scores}))
        return
    more = f", {halt_steps} steps each" if halt_steps else ""
    title = f"{run}, step {loaded.step:,}, {loaded.weights} weights{more}"
    console.print(scores_table(title, experiment.task, scores))
    say(console, experiment.task.description)
