"""`tinypod weights`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tinypod.cli import shared
from tinypod.cli.shared import console, load_config, weights_app
from tinypod.errors import UserError
from tinypod.runs.terminal import say


@weights_app.command("export")
def weights_export(
    run: shared.RunFolder,
    out: Annotated[
        Path, typer.Argument(help="The PyTorch or safetensors file to write; of a language model, the folder.")
    ],
    checkpoint: shared.CheckpointOption = "best",
    weights: shared.WeightsOption = None,
    format: Annotated[
        Literal["hugging_face", "peft", "packed", "release"] | None,
        typer.Option(help="`release` of a puzzle run, else the authors'; others of a language model: hugging_face."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of a release or a language model; default: bfloat16, of `packed` float16."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="With `--format peft`: write the weights that the adapters belong to into this folder."),
    ] = None,
    examples: Annotated[
        Path | None,
        typer.Option(
            help="With `--format release`: a file with 1 to 8 puzzles, one a line, for `tinypod solve` to show."
        ),
    ] = None,
) -> None:
    """Write a run's weights: a release, the TRM authors' state dict, or a language model in one of three forms.

    `release` is one safetensors file with the evaluation weights, the config and the scores, which `tinypod solve`,
    `eval` and `view` take as they take a run: `tinypod weights export RUN mine.safetensors --format release`, then
    `tinypod solve mine.safetensors PUZZLE`.

    `hugging_face` has the effective weights: low-bit ones as floats, adapters merged. `peft` has the adapters alone,
    for PEFT's `PeftModel.from_pretrained`. `packed` has low-bit weights as they are, 2 or 4 bits each.
    """
    from tinypod.runs.folder import open_run
    from tinypod.runs.load import load_weights
    from tinypod.weights.exporting import write_weights
    from tinypod.weights.importing import read_origin
    from tinypod.weights.releasing import release_run

    if base is not None and format != "peft":
        raise UserError("--base is for --format peft: what the adapters belong to")
    if examples is not None and format != "release":
        raise UserError("--examples is for --format release: puzzles that come with the weights")
    opened = open_run(run)
    loaded = load_weights(opened, [], checkpoint, weights, needs_data=False)
    if format == "release":
        note = release_run(opened, loaded, out, dtype or "bfloat16", examples)
    else:
        model, origin = loaded.experiment.config.model, read_origin(opened)
        note = write_weights(out, model, loaded.params, dtype, format, base, origin)
    say(console, f"wrote {out}: step {loaded.step:,}, {loaded.weights} weights")
    if note:
        say(console, note)


@weights_app.command("import", cls=shared.TakesOverrides)
def weights_import(
    source: Annotated[
        str,
        typer.Argument(
            metavar="WEIGHTS",
            help="The TRM authors' PyTorch file; for a language model, a Hugging Face or packed folder, or a run.",
        ),
    ],
    config: Annotated[str, typer.Argument(help="The config of that model.", autocompletion=shared.complete_config)],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run folder to make, local or gs://.")],
    overrides: shared.Overrides = None,
    adapter: Annotated[
        Path | None, typer.Option(help="A folder with a PEFT adapter, for a language model with `model.lora`.")
    ] = None,
    snap: Annotated[
        bool, typer.Option("--snap", help="Round the magnitudes g of low-bit weights to float16 values.")
    ] = False,
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
    from tinypod.weights.importing import Options, create_run
    from tinypod.weights.rounding import Rounding, check_installed

    groups = None
    if rounding is not None:
        check_installed()
        groups = Rounding(rounding, group_size)
    options = Options(rounding=groups, adapter=adapter, snap=snap, measure=True)
    imported = create_run(open_run(run), load_config(config, overrides), source, options)
    with_adapter = "" if adapter is None else f" and the adapter of {adapter}"
    say(console, f"{run}: a run at step 0 with the weights of {source}{with_adapter}")
    if imported.quantised is not None:
        console.print(fidelity.render(imported.quantised), highlight=False)
    if imported.snapped is not None:
        say(
            console,
            f"magnitudes are float16 values now; the largest relative change of one is {imported.snapped:.2e}. Train "
            "the rest with task.train.magnitudes=0",
        )
