"""`tinypod eval`."""

from typing import Annotated

import typer

from tinypod.cli import shared
from tinypod.cli.shared import app, console, errors


@app.command("eval", cls=shared.TakesOverrides)
def evaluate(
    run: shared.Trained,
    overrides: shared.UseOverrides = None,
    checkpoint: shared.CheckpointOption = "best",
    weights: shared.WeightsOption = None,
    halt_steps: shared.HaltSteps = None,
    views: shared.Views = None,
    trajectories: shared.Trajectories = None,
    noise: shared.Noise = None,
    noise_at: shared.NoiseAt = None,
    choose: shared.Choose = None,
    split: Annotated[str | None, typer.Option(help="The split; default: the config's data.eval_split.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a run on a whole split: every row exactly once.

    Only the weights are read, so any devices will do: a mesh that does not fit them gives way to one that does. Another
    dataset: `tinypod eval RUN data.path=FOLDER`. Another precision: `model.dtype=float32`. More thinking than in
    training: `--halt-steps 64`, `--views 8`, `--trajectories 4 --noise 0.5`, `--choose first`, alone or together; the
    table has what it costs: the steps of the model for one puzzle. RUN may be a release, which comes without a dataset:
    `tinypod eval FILE.safetensors data.path=FOLDER`.
    """
    import json

    from tinypod import api
    from tinypod.runs.report import scores_table
    from tinypod.runs.terminal import say

    thinking = api.Thinking(
        halt_steps=halt_steps, views=views, trajectories=trajectories, noise=noise, noise_at=noise_at, choose=choose
    )
    model = api.Model(run, overrides or [], checkpoint, weights, errors if as_json else console)
    scores, loaded = model.evaluate(split, limit=limit, **thinking), model.loaded(**thinking)
    if as_json:
        print(json.dumps({"step": loaded.step, "weights": loaded.weights, **scores}))
        return
    more = "".join(f", {text}" for text in shared.describe_thinking(thinking))
    title = f"{run}, step {loaded.step:,}, {loaded.weights} weights{more}"
    console.print(scores_table(title, loaded.experiment.task, scores))
    say(console, loaded.experiment.task.description)
