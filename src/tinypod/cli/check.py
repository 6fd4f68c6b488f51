"""`tinypod check`."""

from typing import Annotated

import typer
from rich.console import Console

from tinypod.cli import shared
from tinypod.cli.shared import app, console, errors, load_config
from tinypod.errors import UserError


@app.command(cls=shared.TakesOverrides)
def check(
    config: Annotated[
        str,
        typer.Argument(help="A YAML config, or a run (folder or gs:// URL).", autocompletion=shared.complete_config),
    ],
    overrides: shared.Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to learn one batch in, and steps to time.")] = 20,
    scratch: Annotated[
        str | None,
        typer.Option(help="Where to try a checkpoint: a folder that all hosts share, or gs://; default: temporary."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
    processes: shared.Processes = None,
    devices_per_process: shared.DevicesPerProcess = 1,
    coordinator: shared.Coordinator = None,
    num_processes: shared.NumProcesses = None,
    process_id: shared.ProcessId = None,
) -> None:
    """Pre-flight: try a config for a minute on the available devices, and say what would go wrong.

    Data and its hashes, rows of every process, equal replicas, one device against all, a checkpoint there and back, a
    loss that falls, no recompiling; speed and memory. Exit code 1 if a check fails. Nothing is left behind, except the
    logs of a rehearsal that failed. Start it like `train`: on every host of a pod, or with `--processes 4
    --devices-per-process 2` to rehearse one.

    Example: `tinypod check demo --processes 2 --devices-per-process 2`
    """
    import json
    from dataclasses import asdict

    from tinypod.check import runner as preflight
    from tinypod.cli import processes as own
    from tinypod.cluster.agreement import Cluster

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
        print(json.dumps([asdict(result) for result in results], ensure_ascii=False))
    if not failed_to_load:
        cluster.shutdown(loaded.health.save_timeout_s)
    if any(result.status == "FAIL" for result in results):
        raise typer.Exit(1)
