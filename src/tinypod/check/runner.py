"""Pre-flight: what must hold before a long run is worth its price, tried on the devices that are there.

Checks (see `checks`) are data (CHECKS) and run in this order. After `vital` ones that did not pass, nothing more can be
tried. Every process runs every check. Their answers are gathered after each: one process that fails is a failure of
all, and what must be the same in all (config, data, batch) is compared. Nothing is left behind; the compilation
cache is not used, so that compile seconds are those of a first start.
"""

import json
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tinypod.check import checks
from tinypod.check.probe import Found, Probe, Skipped
from tinypod.cluster.agreement import Cluster
from tinypod.errors import DeadlineError, UserError
from tinypod.experiment import ExperimentConfig, HealthConfig
from tinypod.health.memory import is_out_of_memory
from tinypod.health.watch import Health
from tinypod.runs import storage
from tinypod.runs.terminal import duration
from tinypod.sharding import all_devices

Status = Literal["pass", "FAIL", "skipped"]
SENT_BYTES = 8192  # a process's answer to the others
SHOWN = 1200  # characters of a reason
IN_COLUMNS = 76  # narrower than this, what was found stands below its check


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    check: str
    status: Status
    found: str
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    name: str
    function: Callable[[Probe], Found]
    vital: bool = False  # the later ones need what it makes


CHECKS = (
    Check("config and data", checks.check_data, vital=True),
    Check("rows", checks.check_rows),
    Check("step", checks.check_step, vital=True),
    Check("replicas", checks.check_replicas),
    Check("1 device = all", checks.check_one_device),
    Check("checkpoint", checks.check_checkpoint),
    Check("learning", checks.check_learning),
    Check("one trace", checks.check_one_trace),
    Check("speed", checks.check_speed),
)


def run_checks(
    config: ExperimentConfig | UserError,
    console: Console,
    *,
    title: str = "check",
    cluster: Cluster | None = None,
    steps: int = 20,
    scratch: str | None = None,
) -> list[Result]:
    """All checks, in all processes; process 0 shows each as it ends. `config` is the error if it did not load."""
    cluster = cluster or Cluster()
    health = HealthConfig() if isinstance(config, UserError) else config.health
    console = console if cluster.is_primary else Console(quiet=True)
    if cluster.count > 1:  # JAX's own handler would swallow it, in wait for a training loop to ask
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with _workspace(scratch, cluster, health) as (local, shared):
        probe = Probe(config, cluster, steps, shared, console)
        with Health(local / "health", cluster.index, cluster.count, health) as watched:
            _print_head(console, title, probe)
            results: list[Result] = []
            stopped_by = None
            for check in CHECKS:
                if stopped_by is not None:
                    result = Result(check.name, "skipped", f"needs `{stopped_by}`")
                else:
                    with watched.phase("compiling"), console.status(check.name):
                        result = run_check(check, probe)
                _print_row(console, result)
                results.append(result)
                if check.vital and result.status != "pass":
                    stopped_by = stopped_by or check.name
    _print_end(console, results)
    return results


def run_check(check: Check, probe: Probe) -> Result:
    """One check in all processes, and what they make of it together."""
    began = time.perf_counter()
    status, found = _attempt(check, probe)
    status, text = _together(probe, status, found)
    return Result(check.name, status, text, time.perf_counter() - began, found.figures if status == "pass" else {})


def _attempt(check: Check, probe: Probe) -> tuple[Status, Found]:
    try:
        return "pass", check.function(probe)
    except Skipped as reason:
        return "skipped", Found(str(reason))
    except DeadlineError:  # the others are gone: no row can be agreed on any more
        raise
    except (UserError, OSError) as error:
        return "FAIL", Found(str(error))
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            return "FAIL", Found(
                "out of device memory: lower batch_size=, raise accumulation= or mesh.fsdp=, or take more devices "
                f"({storage.first_line(error)})"
            )
        if probe.cluster.count > 1:
            raise DeadlineError(
                f"process {probe.cluster.index} lost contact with the others in the check `{check.name}`: "
                f"{storage.first_line(error)}. Look at their logs, then start all of them again"
            ) from error
        return "FAIL", Found(storage.first_line(error))


def _together(probe: Probe, status: Status, found: Found) -> tuple[Status, str]:
    """The answer of all processes: a failure of one is a failure, and so is an answer that should not differ."""
    mine = {"status": status, "text": found.text[:SHOWN], "same": found.same}
    answers = _gather_json(probe, mine)
    for wanted in ("FAIL", "skipped"):
        who = [index for index, answer in enumerate(answers) if answer["status"] == wanted]
        if who:
            named = f"process {who[0]}: " if len(who) < len(answers) else ""
            return wanted, named + answers[who[0]]["text"]
    for index, answer in enumerate(answers):
        differing = [name for name, value in answer["same"].items() if value != answers[0]["same"][name]]
        if differing:
            return "FAIL", (
                f"process {index} differs from process 0 in {' and '.join(differing)}; start every process with the "
                "same command, code and data"
            )
    return status, answers[0]["text"]


def _gather_json(probe: Probe, value: dict[str, Any]) -> list[dict[str, Any]]:
    sent = np.zeros(SENT_BYTES, np.uint8)
    content = json.dumps(value, ensure_ascii=False).encode()
    sent[: len(content)] = np.frombuffer(content, np.uint8)
    return [json.loads(row.tobytes().rstrip(b"\0")) for row in probe.gather(sent)]


@contextmanager
def _workspace(scratch: str | None, cluster: Cluster, health: HealthConfig) -> Iterator[tuple[Path, str]]:
    """A local folder, and one that all processes share if `scratch` is one; both are removed."""
    name = cluster.broadcast("check", f"tinypod-check-{uuid.uuid4().hex[:12]}", health.start_timeout_s)
    remote = scratch is not None and storage.is_remote(scratch)
    local = Path(tempfile.gettempdir() if remote or scratch is None else scratch).absolute() / name
    shared = f"{storage.url_of(scratch)}/{name}" if scratch is not None and remote else str(local)
    try:
        local.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield local, shared
        cluster.barrier("checked", health.save_timeout_s)  # nobody needs it any more
    finally:
        shutil.rmtree(local, ignore_errors=True)  # by each process: the folder may be one on each host
        if remote and cluster.is_primary and storage.folder(shared).exists():
            storage.folder(shared).rmtree()


def _print_head(console: Console, title: str, probe: Probe) -> None:
    where = ""
    if not isinstance(probe.config, UserError):  # else JAX need not be started
        devices = all_devices()
        processes = f" in {probe.cluster.count} processes" if probe.cluster.count > 1 else ""
        where = f" on {len(devices)} × {devices[0].device_kind}{processes}"
    console.print(Text.assemble((title, "bold"), where))
    if console.width >= IN_COLUMNS:
        console.print(_row_table(console, "check", "result", "found", "time", style="dim"))


def _print_row(console: Console, result: Result) -> None:
    style = {"pass": "green", "FAIL": "bold red", "skipped": "yellow"}[result.status]
    seconds, status = duration(result.seconds) if result.seconds else "", Text(result.status, style)
    if console.width >= IN_COLUMNS:
        console.print(_row_table(console, result.check, status, result.found, seconds))
    else:
        console.print(Text(f"{result.check}: ") + status + Text(f", {seconds}" if seconds else ""))
        console.print(Padding(Text(result.found), (0, 0, 0, 2)))


def _row_table(console: Console, *cells: str | Text, style: str = "") -> Table:
    """A table of one row with set widths, so that rows can be printed as they come and still stand in columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.width = console.width
    widths = (max(len(check.name) for check in CHECKS), len("skipped"), None, len("1 min 05 s"))
    for width, justify in zip(widths, ("left", "left", "left", "right"), strict=True):
        table.add_column(width=width, ratio=None if width else 1, justify=justify)  # type: ignore[arg-type]
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell, style) for cell in cells))
    return table


def _print_end(console: Console, results: list[Result]) -> None:
    names = {status: [r.check for r in results if r.status == status] for status in ("pass", "FAIL", "skipped")}
    seconds = f"in {duration(sum(r.seconds for r in results))}"
    skipped = f", {len(names['skipped'])} skipped" if names["skipped"] else ""
    if names["FAIL"]:
        text = f"{len(names['FAIL'])} of {len(results)} checks failed: {', '.join(names['FAIL'])}"
        console.print(Text(f"{text}{skipped}; fix that before you train ({seconds}).", "bold red"))
    else:
        console.print(Text(f"{len(names['pass'])} checks passed{skipped}, {seconds}: ready to train.", "bold green"))
