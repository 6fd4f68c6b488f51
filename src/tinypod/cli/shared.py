"""What the commands share: the app and its groups, the two consoles, options that several commands take."""

from typing import Annotated, Any, Literal

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train tiny recursive reasoning models: one command for a laptop, a GPU or a TPU pod.",
)
data_app = typer.Typer(no_args_is_help=True, help="Build, generate and import datasets.")
weights_app = typer.Typer(no_args_is_help=True, help="PyTorch weights in and out.")
runs_app = typer.Typer(no_args_is_help=True, help="Look at runs.")
cache_app = typer.Typer(no_args_is_help=True, help="Blocks of text, and what a teacher says of them.")
study_app = typer.Typer(no_args_is_help=True, help="Whole studies: many runs from one short file.")
app.add_typer(study_app, name="study")
app.add_typer(data_app, name="data")
app.add_typer(cache_app, name="cache")
app.add_typer(weights_app, name="weights")
app.add_typer(runs_app, name="runs")

console = Console()
errors = Console(stderr=True)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[a.b=value]...",
        help="Config keys to change, like `steps=1000` or `model.mixing.kind=attention`.",
    ),
]
UseOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[a.b=value]...",
        help="Config keys to use it with: `data.*`, `mesh.*`, `model.dtype`, `eval.batch_size`.",
    ),
]
RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its gs:// URL.")]
WeightsOption = Annotated[
    Literal["ema", "live"] | None, typer.Option("--weights", help="Which weights; default: the config's eval.weights.")
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Rehearse a pod: so many processes on this machine's CPU, by the same code as on a pod."),
]
DevicesPerProcess = Annotated[int, typer.Option(min=1, help="With --processes: CPU devices in each.")]
Coordinator = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of process 0, where JAX does not detect the cluster [env: TINYPOD_COORDINATOR]."),
]
NumProcesses = Annotated[int | None, typer.Option(help="Processes in all [env: TINYPOD_NUM_PROCESSES].")]
ProcessId = Annotated[int | None, typer.Option(help="This one's number, from 0 [env: TINYPOD_PROCESS_ID].")]
HaltSteps = Annotated[
    int | None,
    typer.Option(
        "--halt-steps", min=1, help="Steps to think: short for task.halting.max_steps=N; default: as trained."
    ),
]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="Which one: `best`, `latest` or a step.")]


def load_config(config: str, overrides: list[str] | None) -> Any:
    from tinypod.runs import folder as runs

    return runs.load_config(config, overrides or [])
