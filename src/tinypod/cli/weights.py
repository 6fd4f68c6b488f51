"""`tinypod weights`."""

from pathlib import Path
from typing import Annotated

import typer

from tinypod.cli import shared
from tinypod.cli.shared import console, load_config, weights_app
from tinypod.runs.terminal import say


@weights_app.command("export")
def weights_export(
    run: shared.RunFolder,
    out: Annotated[Path, typer.Argument(help="The PyTorch file to write.")],
    checkpoint: shared.CheckpointOption = "best",
    weights: shared.WeightsOption = None,
) -> None:
    """Write a run's weights as the TRM authors' PyTorch state dict."""
    from tinypod.runs.folder import open_run
    from tinypod.runs.load import load_weights
    from tinypod.weights import authors

    loaded = load_weights(open_run(run), [], checkpoint, weights)
    authors.write_state_dict(out, authors.to_state_dict(loaded.params))
    say(console, f"wrote {out}: step {loaded.step:,}, {loaded.weights} weights")


@weights_app.command("import")
def weights_import(
    weights_file: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="The authors' state dict, a PyTorch file.")],
    config: Annotated[str, typer.Argument(help="The config of that model.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run folder to make, local or gs://.")],
    overrides: shared.Overrides = None,
) -> None:
    """Make a run folder from the TRM authors' PyTorch weights, to evaluate, solve with, or train further."""
    from tinypod.runs.folder import open_run
    from tinypod.weights.importing import create_run

    create_run(open_run(run), load_config(config, overrides), weights_file)
    say(console, f"{run}: a run at step 0 with the weights of {weights_file}")
