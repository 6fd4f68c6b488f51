"""What `tinypod runs status` shows of a run: its processes by their heartbeats, its checkpoints, its goodput.

Heartbeats are written at different moments, so a process seems to lag by the steps that the others did since it wrote:
only what is beyond that counts as lagging. Nothing here starts JAX: it works while the run has all devices.
"""

import statistics
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinypod.errors import UserError
from tinypod.health import goodput, goodput_view, heartbeat
from tinypod.health.heartbeat import Heartbeat
from tinypod.runs import storage
from tinypod.runs.folder import HEALTH
from tinypod.runs.terminal import duration

_SLOW = 1.2  # times the median of all processes
_STEPS_BETWEEN = 2  # loops run ahead of their devices by a step or two
_STYLES = {"ok": "green", "lagging": "yellow", "slow": "yellow", "silent": "red", "gone": "red", "unreadable": "red"}


@dataclass(frozen=True)
class ProcessStatus:
    heartbeat: Heartbeat
    lag: int  # steps behind the furthest
    verdict: str  # ok, lagging, slow, silent, gone, unreadable, or "ended: how"

    @property
    def alive(self) -> bool:
        return self.verdict in ("ok", "lagging", "slow")


@dataclass(frozen=True)
class RunStatus:
    processes: list[ProcessStatus]
    missing: list[int]  # that the others count and that have no heartbeat
    steps: int | None  # that the config asks for
    checkpoints: list[int]
    goodput: goodput.Goodput
    summary: str


def read_status(run_folder: Path, now: float, checkpoints: Path | str | None = None) -> RunStatus:
    """Of a run that may be running, ended or dead; reads files only. `checkpoints`: where they are, if not beside."""
    if not (run_folder / "config.yaml").exists() and not (run_folder / HEALTH).exists():
        raise UserError(
            f"{run_folder} is not a run folder: it has neither config.yaml nor {HEALTH}/. Give the folder "
            "that `tinypod train` wrote to, e.g. runs/demo"
        )
    beats = heartbeat.read_heartbeats(run_folder / HEALTH)
    count = beats[0].count if beats and beats[0].process == 0 else 0
    beats = [beat for beat in beats if not count or beat.process < count]  # not of an earlier start with more
    processes = judge(beats, now)
    known = {beat.process for beat in beats}
    missing = [i for i in range(max((beat.count for beat in beats), default=0)) if i not in known]
    steps = _configured_steps(run_folder)
    return RunStatus(
        processes=processes,
        missing=missing,
        steps=steps,
        checkpoints=_checkpoint_steps(checkpoints or run_folder / "checkpoints"),
        goodput=goodput.summarise(run_folder),
        summary=_summary(processes, missing, steps, now),
    )


def judge(beats: list[Heartbeat], now: float) -> list[ProcessStatus]:
    """A verdict on each process, from all of them together."""
    readable = [beat for beat in beats if beat.unreadable is None]
    live = [beat for beat in readable if _verdict(beat, now) == "ok"]  # not what an earlier start left behind
    furthest = max(live or readable, key=lambda beat: (beat.step, beat.time), default=None)
    typical_ms = statistics.median([beat.step_ms["p50"] for beat in readable if "p50" in beat.step_ms] or [0.0])
    statuses = []
    for beat in beats:
        lag = max(0, furthest.step - beat.step) if furthest is not None and beat.unreadable is None else 0
        verdict = _verdict(beat, now)
        if verdict == "ok" and furthest is not None:
            if lag > _STEPS_BETWEEN + _steps_since(beat, furthest):
                verdict = "lagging"
            elif typical_ms > 0 and beat.step_ms.get("p50", 0.0) >= _SLOW * typical_ms:
                verdict = "slow"
        statuses.append(ProcessStatus(beat, lag, verdict))
    return statuses


def _verdict(beat: Heartbeat, now: float) -> str:
    if beat.unreadable is not None:
        return "unreadable"
    if beat.ended is not None:
        return f"ended: {beat.ended}"
    if beat.is_gone():
        return "gone"
    return "silent" if beat.is_silent(now) else "ok"


def _steps_since(beat: Heartbeat, furthest: Heartbeat) -> float:
    """Steps that the furthest process may have done after this one wrote its heartbeat."""
    step_ms = furthest.step_ms.get("p50")
    elapsed_s = max(0.0, furthest.time - beat.time)
    if step_ms is None:  # no step was timed yet: nothing to judge by
        return float("inf") if elapsed_s > 0 else 0.0
    return 1000 * elapsed_s / max(step_ms, 1e-3)


def render_status(run_folder: Path, now: float, checkpoints: Path | str | None = None) -> RenderableType:
    """For a terminal of 100 columns."""
    status = read_status(run_folder, now, checkpoints)
    parts: list[RenderableType] = [Text(status.summary, style="bold")]
    if status.processes:
        parts.append(_table(status, now))
    if status.checkpoints:
        shown = ", ".join(f"{step:,}" for step in status.checkpoints[-5:])
        parts.append(Text(f"checkpoints: {'… ' if len(status.checkpoints) > 5 else ''}{shown}"))
    return Group(*parts, goodput_view.render(status.goodput))


def as_json(run_folder: Path, now: float, checkpoints: Path | str | None = None) -> dict[str, Any]:
    """The same for programs; times are Unix seconds."""
    status = read_status(run_folder, now, checkpoints)
    processes = [
        {**process.heartbeat.model_dump(), "lag": process.lag, "verdict": process.verdict, "alive": process.alive}
        for process in status.processes
    ]
    time_spent = {"total_s": status.goodput.total_s, "goodput": status.goodput.goodput, **asdict(status.goodput)}
    return {
        "summary": status.summary,
        "time": now,
        "running": any(process.alive for process in status.processes),
        "step": _furthest(status.processes),
        "steps": status.steps,
        "processes": processes,
        "missing": status.missing,
        "checkpoints": status.checkpoints,
        "goodput": time_spent,
    }


def _table(status: RunStatus, now: float) -> RenderableType:
    """Narrow columns; what needs words comes below."""
    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for name in ("#", "host", "pid", "step", "lag", "phase", "for", "ms p50/p90/max", "seen", "verdict"):
        left = name in ("host", "phase", "verdict")
        table.add_column(name, justify="left" if left else "right", no_wrap=True, max_width=16 if left else None)
    notes = []
    for process in status.processes:
        beat = process.heartbeat
        verdict, _, how = process.verdict.partition(": ")
        style = _STYLES.get(verdict, "green" if how == "done" else "yellow")
        if beat.unreadable is not None:
            notes.append(f"process {beat.process}: its heartbeat cannot be read: {beat.unreadable}")
            table.add_row(str(beat.process), *[""] * 8, Text(verdict, style=style))
            continue
        if how not in ("", "done"):
            notes.append(f"process {beat.process} {process.verdict}")
        table.add_row(
            str(beat.process),
            beat.host,
            str(beat.pid),
            f"{beat.step:,}",
            f"{process.lag:,}" if process.lag else "",
            beat.phase if beat.ended is None else "",
            _short(now - beat.phase_since) if beat.ended is None else "",
            "/".join(f"{beat.step_ms[name]:.4g}" for name in ("p50", "p90", "max") if name in beat.step_ms),
            _short(beat.age(now)),
            Text("done" if how == "done" else verdict, style=style),
        )
    for number in status.missing:
        table.add_row(str(number), *[""] * 8, Text("no heartbeat", style="red"))
    return Group(table, *(Text(note, style="yellow") for note in notes))


def _short(seconds: float) -> str:
    """Two or three digits and a unit: `7 s`, `12 min`, `3.5 h`, `2.1 d`."""
    for size, unit, digits in ((60.0, "s", 0), (60.0, "min", 0), (24.0, "h", 1)):
        if seconds < size:
            return f"{max(0.0, seconds):.{digits}f} {unit}"
        seconds /= size
    return f"{seconds:.1f} d"


def _summary(processes: list[ProcessStatus], missing: list[int], steps: int | None, now: float) -> str:
    if not processes:
        return "no heartbeat: this run has not started yet"
    of = f" of {steps:,}" if steps is not None else ""
    where = f"step {_furthest(processes):,}{of}"
    alive = sum(process.alive for process in processes)
    count = len(processes) + len(missing)
    if alive:
        behind = sum(process.verdict in ("lagging", "slow") for process in processes)
        absent = count - alive
        parts = [f"running: {alive} of {count} process{'es' if count > 1 else ''}", where]
        parts += [f"{behind} straggler{'s' if behind > 1 else ''}"] if behind else []
        parts += [f"{absent} not alive"] if absent else []
        return ", ".join(parts)
    readable = [process.heartbeat for process in processes if process.heartbeat.unreadable is None]
    if not readable:
        return "no heartbeat can be read"
    last = max(readable, key=lambda beat: beat.time)
    when = f"{datetime.fromtimestamp(last.time):%Y-%m-%d %H:%M:%S}, {duration(last.age(now))} ago"
    if {beat.ended for beat in readable} == {"done"}:
        return f"done: {where}, ended {when}"
    ends = {beat.ended for beat in readable if beat.ended not in (None, "done")}
    how = f"; {'; '.join(sorted(filter(None, ends)))}" if ends else ""
    return f"no process is alive: {where}, last seen {when}{how}"


def _furthest(processes: list[ProcessStatus]) -> int:
    return max((process.heartbeat.step for process in processes), default=0)


def _configured_steps(run_folder: Path) -> int | None:
    """Without the schema: an older version's config has them too."""
    try:
        steps = yaml.safe_load((run_folder / "config.yaml").read_text())["steps"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def _checkpoint_steps(where: Path | str) -> list[int]:
    with storage.explained(where):
        folder = storage.folder(where)
        if not folder.is_dir():
            return []
        found = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        complete = [path for path in found if not storage.is_remote(where) or (path / storage.MARKER).exists()]
        return sorted(int(path.name) for path in complete)
