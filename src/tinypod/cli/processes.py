"""How a command becomes processes: joining those of a pod, or starting its own to rehearse one or to supervise.

Only the command line uses this. The child is the same command without the flags that made it a child.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tinypod.cluster import launch, startup
from tinypod.cluster.agreement import Cluster
from tinypod.cluster.supervise import supervise as start_again
from tinypod.experiment import HealthConfig
from tinypod.health import goodput
from tinypod.health.heartbeat import read_heartbeats
from tinypod.runs.folder import HEALTH, Run
from tinypod.runs.metrics import MetricsLog
from tinypod.runs.saver import SUPERVISED


def join_cluster(
    config: HealthConfig, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Cluster:
    """The cluster that flags, the environment or JAX's detection speak of; this process alone, where none does."""
    settings = startup.settings_from(coordinator, num_processes, process_id, os.environ)
    # JAX's own heartbeat ends processes without saying why: our deadlines come first.
    longest_s = max(config.step_timeout_s, config.save_timeout_s, config.restore_timeout_s)
    return startup.start(settings, config.start_timeout_s, longest_s + 60)


def train_apart(
    arguments: list[str],
    from_step: int | None,
    run: Run,
    console: Console,
    *,
    processes: int | None,
    devices_per_process: int,
    supervise: bool,
) -> int:
    """`tinypod ARGUMENTS` in processes of its own, with `--from-step` until it was obeyed; the exit code."""

    def run_once() -> int:
        argv = [sys.executable, "-m", "tinypod", *arguments]
        if from_step is not None and not _began_at(run, from_step, after=started):
            argv += ["--from-step", str(from_step)]
        logs = run.folder / "logs"
        if processes is None:
            return launch.run_child(argv, logs, output=console)
        return launch.launch(argv, processes, devices_per_process, logs, output=console)

    started = time.time()
    if not supervise:
        return run_once()
    os.environ[SUPERVISED] = "1"
    return start_again(run_once, lambda: _last_step(run, after=started), console=console)


def _began_at(run: Run, step: int, after: float) -> bool:
    try:
        attempts = goodput.read_attempts(run.folder)
    except (OSError, ValueError):  # not there yet, or damaged: the run itself sees to that
        return False
    return any(attempt.started >= after and attempt.first_step == step for attempt in attempts)


def _last_step(run: Run, after: float) -> int | None:
    """How far a run has come since then, by its heartbeats and its metrics; it may have been further before."""
    steps = [beat.step for beat in read_heartbeats(run.folder / HEALTH) if beat.time >= after]
    records = MetricsLog(run.folder).read()[-1:]
    return max([*steps, *(int(record["step"]) for record in records if record["time"] >= after)], default=None)


def check_apart(
    arguments: list[str], scratch: str | None, processes: int, devices_per_process: int, console: Console, as_json: bool
) -> int:
    """The same check as a local cluster. The logs of one that failed stay: what is printed says where they are."""
    folder = Path(tempfile.mkdtemp(prefix="tinypod-check-"))
    logs, code = folder / "logs", 1
    os.environ.setdefault("COLUMNS", str(console.width - len("[0] ")))  # for their tables: they have no terminal
    try:
        argv = [sys.executable, "-m", "tinypod", *arguments, "--scratch", scratch or str(folder / "scratch")]
        code = launch.launch(argv, processes, devices_per_process, logs, output=console)
        if as_json:
            lines = (logs / "process_0.log").read_text(errors="replace").splitlines()
            print(next((line for line in lines if line.startswith('[{"check"')), "[]"))
    finally:
        shutil.rmtree(folder / "scratch" if code else folder, ignore_errors=True)
    return code
