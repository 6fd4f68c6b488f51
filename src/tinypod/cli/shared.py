"""What the commands share: the app and its groups, the two consoles, options that several commands take."""

import glob
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperCommand

from tinypod.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train tiny recursive reasoning models: one command for a laptop, a GPU or a TPU pod.",
)
data_app = typer.Typer(no_args_is_help=True, help="Build, generate and import datasets.")
weights_app = typer.Typer(no_args_is_help=True, help="PyTorch weights in and out.")
runs_app = typer.Typer(no_args_is_help=True, help="Look at runs; take one to another machine.")
cache_app = typer.Typer(no_args_is_help=True, help="Blocks of text, and what a teacher says of them.")
study_app = typer.Typer(no_args_is_help=True, help="Whole studies: many runs from one short file.")
app.add_typer(study_app, name="study")
app.add_typer(data_app, name="data")
app.add_typer(cache_app, name="cache")
app.add_typer(weights_app, name="weights")
app.add_typer(runs_app, name="runs")

console = Console()
errors = Console(stderr=True)


class TakesOverrides(TyperCommand):
    """A command with config keys among its arguments. Tells whoever writes one as an option how it is written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        for text, following in pairwise([*args, ""]):
            name, equals, value = text.partition("=")
            if name.startswith("-") and name not in options and not ctx.resilient_parsing:
                _teach_override(name, value if equals else following)
        return super().parse_args(ctx, args)


def _teach_override(option: str, value: str) -> None:
    """An error if the option is called like a config key."""
    from tinypod.config import known_keys, namesakes
    from tinypod.experiment import ExperimentConfig

    value = "..." if not value or value.startswith("-") else value
    meant = namesakes(option.strip("-").replace("-", "_"), known_keys(ExperimentConfig))
    if meant:
        raise UserError(
            f"{option} is not an option; config keys are written as key=value, without dashes: "
            + " or ".join(f"{key}={value}" for key in meant)
        )


def _complete_paths(incomplete: str, suffix: str = ".yaml") -> list[str]:
    """Folders and files of a kind, as a shell would."""
    found = sorted(glob.glob(f"{incomplete}*"))
    return [
        f"{path}/" if os.path.isdir(path) else path for path in found if os.path.isdir(path) or path.endswith(suffix)
    ]


def complete_config(incomplete: str) -> list[str]:
    from tinypod.config import recipes

    return [*(name for name in recipes() if name.startswith(incomplete)), *_complete_paths(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    return _complete_runs(incomplete, ".yaml")


def _complete_runs(incomplete: str, suffix: str) -> list[str]:
    runs = [str(path.parent) for path in sorted(Path("runs").glob("*/config.yaml"))]
    return [path for path in runs if path.startswith(incomplete)] or _complete_paths(incomplete, suffix)


def complete_trained(incomplete: str) -> list[str]:
    from tinypod.runs.release import SUFFIX, shipped

    return [*(name for name in shipped() if name.startswith(incomplete)), *_complete_runs(incomplete, SUFFIX)]


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
RunFolder = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder, or its gs:// URL.", autocompletion=complete_run)
]
Trained = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run folder, or its gs:// URL; a release file, or the name of a release that is shipped.",
        autocompletion=complete_trained,
    ),
]
WeightsOption = Annotated[
    Literal["ema", "live"] | None, typer.Option("--weights", help="Which weights; default: the config's eval.weights.")
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Rehearse a pod: this many processes on this machine's CPU, with the code of a pod."),
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
Views = Annotated[
    int | None,
    typer.Option(min=1, help="Look at each puzzle in so many symmetric views, itself among them: that many chains."),
]
Trajectories = Annotated[
    int | None, typer.Option(min=1, help="Think about each view so often, with noise after the first time.")
]
Noise = Annotated[
    float | None,
    typer.Option(min=0.0, help="With --trajectories: its standard deviation, where the state's is 1; try 0.5."),
]
NoiseAt = Annotated[
    Literal["start", "every_step"] | None, typer.Option(help="Add the noise at the start, or before every step.")
]
Choose = Annotated[
    Literal["vote", "confident", "first", "settled", "valid"] | None,
    typer.Option(
        help="One answer of all chains: a `vote` weighted by how sure each is (default), that of the most `confident`, "
        "of the `first` to stop, of the first that would stop and is `settled` (the same answer in two steps), or the "
        "first that is `valid` by the rules of Sudoku, which the model is not told. With the last three thinking ends "
        "there, for a batch once all its puzzles have stopped."
    ),
]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="Which one: `best`, `latest` or a step.")]


def load_config(config: str, overrides: list[str] | None) -> Any:
    from tinypod.runs import folder as runs

    return runs.load_config(config, overrides or [])


def describe_thinking(thinking: Mapping[str, Any]) -> list[str]:
    """What was asked for on the command line, in words."""
    words = {
        "halt_steps": "{} steps each",
        "views": "{} views",
        "trajectories": "{} trajectories",
        "noise": "noise {}",
        "noise_at": "at {}",
        "choose": "{}",
    }
    choices = {"vote": "by vote", "confident": "the most confident", "first": "the first to stop"}
    choices |= {"settled": "the first to stop that has settled", "valid": "the first that is valid"}
    given = {name: value for name in words if (value := thinking.get(name)) is not None}
    return [words[name].format(choices.get(value, str(value).replace("_", " "))) for name, value in given.items()]
