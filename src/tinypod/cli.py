"""The commands: parse, dispatch, print. What they do stands in the modules they call."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tinypod.errors import StorageError, UserError

if TYPE_CHECKING:
    from tinypod.run import Run

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
app.add_typer(data_app, name="data")
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
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="Which one: `best`, `latest` or a step.")]


def main() -> None:
    """The console script: a user's error is a message and its exit code, never a traceback."""
    try:
        app()
    except UserError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.filename is None and error.strerror is None:
            raise
        from tinypod import storage

        again = storage.may_pass(error)
        message = f"{error.filename or 'a file'}: {error.strerror}"
        _fail(message, StorageError.exit_code if again else UserError.exit_code)
    except Exception:
        if not _in_cluster():
            raise
        errors.print_exception()
        _end(1)


def _fail(message: str, exit_code: int = UserError.exit_code) -> None:
    errors.print("[bold red]error:[/] ", end="")
    errors.print(message, markup=False, highlight=False, soft_wrap=True)
    _end(exit_code)


def _end(exit_code: int) -> None:
    if _in_cluster():
        from tinypod import distributed

        distributed.end_now(exit_code)  # without waiting for processes that cannot come
    sys.exit(exit_code)


def _in_cluster() -> bool:
    module = sys.modules.get("tinypod.distributed")
    return module is not None and module.is_started()


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        console.print(f"tinypod {version('tinypod')}", highlight=False)
        raise typer.Exit


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="A YAML config, or a run (folder or gs:// URL) to go on with.")],
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="The run folder, local or gs://; default: runs/ and the config's name."),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", help="Go on from this checkpoint, once; newer ones are set aside, not deleted."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Trace these steps on every process, for XProf or TensorBoard, e.g. `20:24`.")
    ] = None,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Start again after a crash, until the same step has failed three times.")
    ] = False,
    processes: Processes = None,
    devices_per_process: DevicesPerProcess = 1,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
) -> None:
    """Train, or go on where the run folder left off.

    Starting the same command again continues from the latest checkpoint. Ctrl-C (exit code 130) and SIGTERM (143)
    save one first. On a TPU pod, under Slurm and on GKE start this command on every host: the processes find each
    other. Elsewhere give each one `--coordinator`, `--num-processes` and `--process-id`. To rehearse a pod on this
    machine: `--processes 4 --devices-per-process 2`.

    Example: `tinypod train configs/demo.yaml steps=500 --run runs/short`
    """
    from tinypod import processes as own
    from tinypod import profiling
    from tinypod import train as training

    loaded, target = _load(config, overrides), _target(config, run)
    steps = profiling.parse_range(profile) if profile is not None else None
    if processes is not None or supervise:
        arguments = ["train", config, *(overrides or []), "--run", str(target), *_option("--profile", profile)]
        code = own.train_apart(
            arguments,
            _option("--from-step", from_step),
            target,
            console,
            processes=processes,
            devices_per_process=devices_per_process,
            supervise=supervise,
        )
        raise typer.Exit(code)
    cluster = own.join_cluster(loaded.health, coordinator, num_processes, process_id)
    outcome = training.train(loaded, target, console, cluster=cluster, from_step=from_step, profile=steps)
    if cluster.is_primary:
        _print_outcome(target, outcome)
    cluster.shutdown(loaded.health.save_timeout_s)
    if outcome.stopped_by is not None:
        raise typer.Exit(128 + int(outcome.stopped_by))


def _load(config: str, overrides: list[str] | None) -> Any:
    """The config of a file, or of a run."""
    from tinypod import config as configs
    from tinypod import run as runs
    from tinypod import storage
    from tinypod.experiment import ExperimentConfig

    path = Path(config)
    if storage.is_remote(config):
        stored = runs.open_run(config)
        stored.pull()
        path = stored.folder
    return configs.load(path / runs.CONFIG if path.is_dir() else path, overrides or [], ExperimentConfig)


def _target(config: str, run: str | None) -> "Run":
    """The run to train: the one named, the one that the config is of, or one named like the config."""
    from tinypod import run as runs
    from tinypod import storage

    path = Path(config)
    if run is not None or storage.is_remote(config):
        return runs.open_run(run or config)
    of_a_run = path.name == runs.CONFIG and (path.parent / runs.CHECKPOINTS).is_dir()
    return runs.open_run(path if path.is_dir() else path.parent if of_a_run else Path("runs") / path.stem)


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [name, str(value)]


def _print_outcome(run: "Run", outcome: Any) -> None:
    from tinypod import goodput

    _print_summary(run, outcome)
    if outcome.trained:
        console.print(goodput.render(goodput.summarise(run.folder)))
    elif outcome.stopped_by is None:
        console.print(f"nothing left to do at step {outcome.step}; to train further, raise steps=", highlight=False)
    if outcome.stopped_by is not None:
        console.print(f"stopped by {outcome.stopped_by.name}; start the same command again to go on", highlight=False)


def _print_summary(run: "Run", outcome: Any) -> None:
    from tinypod import report

    facts = report.summary(run.folder)
    table = Table(title=f"{run}", show_header=False, title_justify="left")
    table.add_row("steps done", f"{outcome.step:,}")
    if facts["eval"]:
        table.add_row("held-out exact", f"{facts['eval']['eval/exact_accuracy']:.2%}")
        table.add_row("held-out cells", f"{facts['eval']['eval/cell_accuracy']:.2%}")
    if outcome.best is not None:
        table.add_row("best checkpoint", f"step {outcome.best[0]:,} ({outcome.best[1]:.4f})")
    for name, label in (("final_loss", "last loss"), ("examples_per_s", "examples/s")):
        if facts.get(name) is not None:
            table.add_row(label, f"{facts[name]:,.4g}")
    table.add_row("curves", str(run.folder / "curves.png"))
    console.print(table)


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

    from tinypod import run as runs
    from tinypod.evaluate import Evaluator
    from tinypod.progress import counting
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
    from tinypod import display, solve
    from tinypod import run as runs
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


@data_app.command("sudoku")
def data_sudoku(
    out: Annotated[Path, typer.Argument(help="The dataset folder to make.")],
    train_csv: Annotated[Path | None, typer.Option("--train-csv", help="The official train.csv.")] = None,
    test_csv: Annotated[Path | None, typer.Option("--test-csv", help="The official test.csv.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Make puzzles up instead of reading them.")] = False,
    train_size: Annotated[
        int, typer.Option("--train-size", min=1, help="Training puzzles, drawn with the seed.")
    ] = 1000,
    test_size: Annotated[
        int | None,
        typer.Option("--test-size", min=1, help="Held-out puzzles; default: all there are, or 1000 made up."),
    ] = None,
    box: Annotated[
        str, typer.Option(help="Rows x columns of a box: 3x3 is the usual 9×9, 2x3 a 6×6, 2x2 a 4×4.")
    ] = "3x3",
    clues: Annotated[
        int | None,
        typer.Option(min=1, help="With --generate: at least this many clues; default: as few as can be."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the subsample, or the puzzles made up.")] = 0,
) -> None:
    """Sudoku puzzles with exactly one solution each.

    From the Hugging Face hub (Sudoku-Extreme), from local CSVs with `--train-csv` and `--test-csv`, or made up with
    `--generate`. Rows that are no valid puzzle are refused with their line number.

    Examples: `tinypod data sudoku data/sudoku --train-size 1000` ·
    `tinypod data sudoku data/small --generate --box 2x2 --clues 6 --train-size 200 --test-size 100`
    """
    from tinypod.data import build

    info = build.build_sudoku(
        out,
        train_csv=train_csv,
        test_csv=test_csv,
        generate=generate,
        train_size=train_size,
        test_size=test_size,
        box=build.parse_box(box),
        clues=clues,
        seed=seed,
        console=console,
    )
    build.describe(out, info, console)


@data_app.command("import")
def data_import(
    folder: Annotated[Path, typer.Argument(help="A folder that the TRM authors' scripts made (train/, test/).")],
    out: Annotated[Path, typer.Argument(help="The dataset folder to make.")],
) -> None:
    """Read the TRM authors' converted datasets (`train/all__inputs.npy` and so on)."""
    from tinypod.data import build, puzzles

    info, splits = puzzles.import_authors_folder(folder)
    build.describe(out, puzzles.write_dataset(out, info, splits), console)


@weights_app.command("export")
def weights_export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(help="The PyTorch file to write.")],
    checkpoint: CheckpointOption = "best",
    weights: WeightsOption = None,
) -> None:
    """Write a run's weights as the TRM authors' PyTorch state dict."""
    from tinypod import run as runs
    from tinypod.models import torch_weights
    from tinypod.step import evaluation_params

    experiment, state = runs.load_state(runs.open_run(run), [], checkpoint)
    weights = weights or experiment.config.eval.weights
    torch_weights.write_state_dict(out, torch_weights.to_state_dict(evaluation_params(state, weights)))
    console.print(f"wrote {out}: step {int(state.step)}, {weights} weights", highlight=False)


@weights_app.command("import")
def weights_import(
    weights_file: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="The authors' state dict, a PyTorch file.")],
    config: Annotated[Path, typer.Argument(help="The config of that model.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run folder to make, local or gs://.")],
    overrides: Overrides = None,
) -> None:
    """Make a run folder from the TRM authors' PyTorch weights, to evaluate, solve with, or train further."""
    from tinypod import config as configs
    from tinypod import run as runs
    from tinypod.experiment import ExperimentConfig
    from tinypod.models import torch_weights

    resolved = configs.load(config, overrides or [], ExperimentConfig)
    runs.create_from_params(runs.open_run(run), resolved, torch_weights.read_state_dict(weights_file))
    console.print(f"{run}: a run at step 0 with the weights of {weights_file}", highlight=False)


@runs_app.command("status")
def runs_status(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Who is doing what in a run: processes, lag, stragglers, and where the time went."""
    import json
    import time

    from tinypod import run as runs
    from tinypod import status

    looked_at = runs.open_run(run)
    looked_at.pull()
    if as_json:
        print(json.dumps(status.as_json(looked_at.folder, time.time())))
    else:
        console.print(status.render_status(looked_at.folder, time.time()))


@app.command()
def check(
    config: Annotated[str, typer.Argument(help="A YAML config, or a run (folder or gs:// URL).")],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to learn one batch in, and steps to time.")] = 20,
    scratch: Annotated[
        str | None,
        typer.Option(help="Where to try a checkpoint: a folder that all hosts share, or gs://; default: temporary."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
    processes: Processes = None,
    devices_per_process: DevicesPerProcess = 1,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
) -> None:
    """Pre-flight: try a config for a minute on the devices that are there, and say what would go wrong.

    Data and its hashes, rows of every process, equal replicas, one device against all, a checkpoint there and back, a
    loss that falls, no recompiling; speed and memory. Exit code 1 if a check fails. Nothing is left behind, except the
    logs of a rehearsal that failed. Start it like `train`: on every host of a pod, or with `--processes 4
    --devices-per-process 2` to rehearse one.

    Example: `tinypod check configs/demo.yaml --processes 2 --devices-per-process 2`
    """
    import json

    from tinypod import check as preflight
    from tinypod import processes as own
    from tinypod.distributed import Cluster

    try:
        loaded = _load(config, overrides)
    except UserError as error:  # it is the first row of the table
        loaded = error
    failed_to_load = isinstance(loaded, UserError)
    if processes is not None and not failed_to_load:
        arguments = ["check", config, *(overrides or []), "--steps", str(steps), *(["--json"] if as_json else [])]
        shown = errors if as_json else console
        raise typer.Exit(own.check_apart(arguments, scratch, processes, devices_per_process, shown, as_json))
    cluster = Cluster() if failed_to_load else own.join_cluster(loaded.health, coordinator, num_processes, process_id)
    shown = Console(quiet=True) if as_json else console
    results = preflight.run_checks(loaded, shown, title=config, cluster=cluster, steps=steps, scratch=scratch)
    if as_json and cluster.is_primary:
        print(json.dumps([result.as_json() for result in results], ensure_ascii=False))
    if not failed_to_load:
        cluster.shutdown(loaded.health.save_timeout_s)
    if any(result.status == "FAIL" for result in results):
        raise typer.Exit(1)
