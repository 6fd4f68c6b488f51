"""Commands that train, and that look at what trains."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tinypod.cli.shared import (
    Coordinator,
    DevicesPerProcess,
    NumProcesses,
    Overrides,
    Processes,
    ProcessId,
    RunFolder,
    app,
    console,
    errors,
    load_config,
    runs_app,
)
from tinypod.errors import UserError

if TYPE_CHECKING:
    from tinypod.runs.folder import Run


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

    Example: `tinypod train demo steps=500 --run runs/short`
    """
    from tinypod import train as training
    from tinypod.cli import processes as own
    from tinypod.runs import profiling

    loaded, target = load_config(config, overrides), _target(config, run)
    steps = profiling.parse_range(profile) if profile is not None else None
    if processes is not None or supervise:
        joining = [("--coordinator", coordinator), ("--num-processes", num_processes), ("--process-id", process_id)]
        given = [name for name, value in joining if value is not None]
        if processes is not None and given:
            raise UserError(f"--processes starts processes of its own, {' and '.join(given)} joins others: choose one")
        arguments = ["train", config, *(overrides or []), "--run", str(target), *_option("--profile", profile)]
        arguments += [part for name, value in joining for part in _option(name, value)]
        code = own.train_apart(
            arguments,
            from_step,
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


def _target(config: str, run: str | None) -> "Run":
    """The run to train: the one named, the one that the config is of, or one named like the config."""
    from tinypod.runs import folder as runs
    from tinypod.runs import storage

    path = Path(config)
    if run is not None or storage.is_remote(config):
        return runs.open_run(run or config)
    of_a_run = path.name == runs.CONFIG and (path.parent / runs.CHECKPOINTS).is_dir()
    return runs.open_run(path if path.is_dir() else path.parent if of_a_run else Path("runs") / path.stem)


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [name, str(value)]


def _print_outcome(run: "Run", outcome: Any) -> None:
    from tinypod.health import goodput

    _print_summary(run, outcome)
    if outcome.trained:
        console.print(goodput.render(goodput.summarise(run.folder)))
    elif outcome.stopped_by is None:
        console.print(f"nothing left to do at step {outcome.step}; to train further, raise steps=", highlight=False)
    if outcome.stopped_by is not None:
        console.print(f"stopped by {outcome.stopped_by.name}; start the same command again to go on", highlight=False)


def _print_summary(run: "Run", outcome: Any) -> None:
    from tinypod.runs import curves as report

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

    Example: `tinypod check demo --processes 2 --devices-per-process 2`
    """
    import json

    from tinypod.check import runner as preflight
    from tinypod.cli import processes as own
    from tinypod.cluster.startup import Cluster

    try:
        loaded = load_config(config, overrides)
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


@runs_app.command("status")
def runs_status(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Who is doing what in a run: processes, lag, stragglers, and where the time went."""
    import json
    import time

    from tinypod.runs import folder as runs
    from tinypod.runs import status

    looked_at = runs.open_run(run)
    looked_at.pull()
    looked_at.pull_heartbeats()
    if as_json:
        print(json.dumps(status.as_json(looked_at.folder, time.time(), looked_at.checkpoints)))
    else:
        console.print(status.render_status(looked_at.folder, time.time(), looked_at.checkpoints))
