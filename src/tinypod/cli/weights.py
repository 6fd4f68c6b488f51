"""`tinypod weights`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tinypod.cli import shared
from tinypod.cli.shared import console, load_config, weights_app
from tinypod.runs.terminal import say


@weights_app.command("export")
def weights_export(
    run: shared.RunFolder,
    out: Annotated[Path, typer.Argument(help="The PyTorch file to write; of a language model, the folder.")],
    checkpoint: shared.CheckpointOption = "best",
    weights: shared.WeightsOption = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of a language model's weights.")] = "bfloat16",
) -> None:
    """Write a run's weights for other programs: the TRM authors' state dict, or a Hugging Face folder.

    Of a language model the effective weights are written: low-bit ones as floats, adapters merged.
    """
    from tinypod.runs.folder import open_run
    from tinypod.runs.load import load_weights
    from tinypod.weights.exporting import write_weights

    loaded = load_weights(open_run(run), [], checkpoint, weights)
    write_weights(out, loaded.experiment.config.model, loaded.params, dtype)
    say(console, f"wrote {out}: step {loaded.step:,}, {loaded.weights} weights")


@weights_app.command("import")
def weights_import(
    source: Annotated[
        str,
        typer.Argument(
            metavar="WEIGHTS", help="The TRM authors' PyTorch file; for a language model, its folder, or another run."
        ),
    ],
    config: Annotated[str, typer.Argument(help="The config of that model.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run folder to make, local or gs://.")],
    overrides: shared.Overrides = None,
    rounding: Annotated[
        Literal["int4", "nf4", "int2"] | None,
        typer.Option("--round", help="Round a language model's plain weights in groups of inputs: a baseline."),
    ] = None,
    group_size: Annotated[int, typer.Option(min=1, help="With --round: inputs that share a scale.")] = 32,
) -> None:
    """Make a run folder from weights, to evaluate, solve with, or train further.

    A language model takes the form that the config gives it: with `model.low_bit` its weights are quantised, with
    `model.lora` it gets adapters, without them the source's are merged. What was quantised is shown with its errors, on
    the config's held-out text.
    """
    from tinypod.runs.folder import open_run
    from tinypod.weights import fidelity
    from tinypod.weights.importing import create_run
    from tinypod.weights.rounding import Rounding, check_installed

    groups = None
    if rounding is not None:
        check_installed()
        groups = Rounding(rounding, group_size)
    quantised = create_run(open_run(run), load_config(config, overrides), source, groups, measure=True)
    say(console, f"{run}: a run at step 0 with the weights of {source}")
    if quantised is not None:
        console.print(fidelity.render(quantised), highlight=False)
