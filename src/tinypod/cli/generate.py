"""`tinypod generate`."""

from typing import Annotated, Literal

import typer

from tinypod.cli.shared import CheckpointOption, app, console


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A run of a language model, or a Hugging Face folder of Qwen3.")],
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; `-`: from standard input; default: a run's held-out text."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among this many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Choose among the likeliest that together have this probability.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Continuations of the same prompt.")] = 1,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Decides what is drawn at a temperature above 0.")
    ] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer.json, its folder, or `bytes`; default: the model's, or that of a run's data."),
    ] = None,
    number: Annotated[int, typer.Option(min=0, help="Which held-out block, when no prompt is given.")] = 0,
    checkpoint: CheckpointOption = "best",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the computation; default: the run's, or bfloat16."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Devices along each axis, like `{data: 1, tensor: 4}`; default: the run's, or all in `data`."
        ),
    ] = None,
) -> None:
    """Continue a text. The prompt is printed, then what the model says, as it comes.

    Example: `tinypod generate Qwen3-0.6B "The capital of France is" --tokens 20`
    """
    import sys

    from tinypod import config as configs
    from tinypod.generate import continuation
    from tinypod.generate.sampling import Sampling
    from tinypod.sharding import MeshConfig
    from tinypod.weights import language_model

    read = None if prompt is None else sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    layout = None
    if mesh is not None:
        layout = configs.validate(configs.parse_override(f"mesh={mesh}")["mesh"], MeshConfig, f"--mesh {mesh}")
    changes = [] if dtype is None else [f"dtype={dtype}"]
    loaded = language_model.load(model, *changes, checkpoint=checkpoint, mesh=layout)
    request = continuation.Request(read, tokens, samples, seed, number)
    continuation.show(console, model, loaded, tokenizer, Sampling(temperature, top_k, top_p), request)
