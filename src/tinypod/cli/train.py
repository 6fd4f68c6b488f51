"""`tinypod train`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tinypod.cli import shared
from tinypod.cli.shared import app, console, errors, load_config
from tinypod.errors import DeviceMemoryError, UserError

if TYPE_CHECKING:
    from tinypod.runs.folder import Run


@app.command(cls=shared.TakesOverrides)
def train(
    config: Annotated[
        str,
        typer.Argument(
            help="A YAML config, or a run (folder or gs:// URL) to resume.", autocompletion=shared.complete_config
        ),
    ],
    overrides: shared.Overrides = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="The run folder, local or gs://; default: runs/ and the config's name."),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", help="Resume from this checkpoint, once; newer ones are set aside, not deleted."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Trace these steps on every process, for XProf or TensorBoard, e.g. `20:24`.")
    ] = None,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Start again after a crash, until the same step has failed three times.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and one last line only.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show config, model, mesh and what would be written; write nothing.")
    ] = False,
    processes: shared.Processes = None,
    devices_per_process: shared.DevicesPerProcess = 1,
    coordinator: shared.Coordinator = None,
    num_processes: shared.NumProcesses = None,
    process_id: shared.ProcessId = None,
) -> None:
    """Train, or resume where the run folder left off.

    Ctrl-C (exit code 130) and SIGTERM (143) save a checkpoint; run it again to resume from there.

    On a TPU pod, under Slurm and on GKE start this command on every host: the processes find each other. Elsewhere give
    each one `--coordinator`, `--num-processes` and `--process-id`. To rehearse a pod on this machine: `--processes 4
    --devices-per-process 2`.

    Several values for a key make a study of all of them (`tinypod study`), in one program where that is possible:
    `tinypod train demo seed=0,1,2 optimizer.learning_rate=1e-3,4e-3`.

    Example: `tinypod train demo steps=500 --run runs/short`
    """
    from tinypod import training
    from tinypod.cli import processes as own
    from tinypod.runs import profiling
    from tinypod.runs.folder import run_to_train
    from tinypod.study.file import split_lists

    lists, rest = split_lists(overrides or [])
    if lists:
        if dry_run:
            raise UserError("--dry-run shows one run; several values for a key make a study: see `tinypod study plan`")
        _train_study(config, lists, rest, run, quiet)
        return
    loaded, target = load_config(config, overrides), run_to_train(config, run)
    if dry_run:
        if any(value is not None for value in (coordinator, num_processes, process_id)):
            raise UserError("--dry-run shows what one process sees: leave out --coordinator and the like")
        return _show_dry_run(loaded, target, from_step, processes, devices_per_process)
    steps = profiling.parse_range(profile) if profile is not None else None
    if processes is not None or supervise:
        joining = [("--coordinator", coordinator), ("--num-processes", num_processes), ("--process-id", process_id)]
        given = [name for name, value in joining if value is not None]
        if processes is not None and given:
            raise UserError(f"--processes starts processes of its own, {' and '.join(given)} joins others: choose one")
        arguments = ["train", config, *(overrides or []), "--run", str(target)]
        arguments += ["--quiet"] if quiet else []
        for name, value in [("--profile", profile), *joining]:
            arguments += [] if value is None else [name, str(value)]
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
    shown = Console(quiet=True) if quiet else console
    try:
        outcome = training.train(loaded, target, shown, cluster=cluster, from_step=from_step, profile=steps)
    except DeviceMemoryError as error:
        from tinypod.planning import local

        raise (local.with_advice(error, loaded, errors) if cluster.count == 1 else error) from None
    if cluster.is_primary:
        show = _print_last_line if quiet else _print_outcome
        show(target, outcome)
    cluster.shutdown(loaded.health.save_timeout_s)
    if outcome.stopped_by is not None:
        raise typer.Exit(128 + int(outcome.stopped_by))


def _train_study(
    config: str, lists: dict[str, list[Any]], overrides: list[str], folder: str | None, quiet: bool
) -> None:
    from tinypod.cli.study import run_and_show
    from tinypod.study.file import study_of

    run_and_show(study_of(config, lists, overrides), folder, None, quiet=quiet)


def _show_dry_run(config: Any, run: "Run", from_step: int | None, processes: int | None, devices: int) -> None:
    from tinypod.runs.dry_run import describe, rehearsed_devices
    from tinypod.runs.terminal import say

    if processes is not None:
        rehearsed_devices(processes * devices)
    say(console, describe(config, run, from_step))


def _print_last_line(run: "Run", outcome: Any) -> None:
    parts, best = [f"step {outcome.step:,} of {outcome.experiment.config.steps:,}"], outcome.experiment.best
    if outcome.best is not None and best is not None:
        parts.append(f"best {best.label} {best.show(outcome.best[1])} at step {outcome.best[0]:,}")
    if outcome.stopped_by is not None:
        parts.append(f"stopped by {outcome.stopped_by.name}; run it again to resume")
    console.print(f"{run}: {', '.join(parts)}", markup=False, highlight=False, soft_wrap=True)


def _print_outcome(run: "Run", outcome: Any) -> None:
    from tinypod.health import goodput, goodput_view
    from tinypod.runs.report import summary_table

    console.print(summary_table(run, outcome.experiment, outcome.step, outcome.best))
    if outcome.trained:
        console.print(goodput_view.render(goodput.summarise(run.folder)))
    elif outcome.stopped_by is None:
        console.print(f"nothing left to do at step {outcome.step:,}; to train further, raise steps=", highlight=False)
    if outcome.stopped_by is not None:
        console.print(f"stopped by {outcome.stopped_by.name}; run it again to resume", highlight=False)
