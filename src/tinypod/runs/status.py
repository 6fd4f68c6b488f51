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
from rich.text import Text

from tinypod.errors import UserError
from tinypod.health import goodput, goodput_view, heartbeat
from tinypod.health.heartbeat import Heartbeat
from tinypod.runs import storage
from tinypod.runs.folder import HEALTH
from tinypod.runs.terminal import Listing, amount, duration

_SLOW = 1.2  # times the median of all processes
_STEPS_BETWEEN = 2  # loops run ahead of their devices by a step or two
_STYLES = {"ok": "green", "lagging": "yellow", "slow": "yellow", "ended: done": "green"}


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
    time: float  # when it was looked at; Unix seconds, as all times
    processes: list[ProcessStatus]
    missing: list[int]  # that the others count and that have no heartbeat
    steps: int | None  # that the config asks for
    checkpoints: list[int]
    goodput: goodput.Goodput

    @property
    def step(self) -> int:
        return max((process.heartbeat.step for process in self.processes), default=0)


def read_status(run_folder: Path, now: float, checkpoints: Path | str | None = None) -> RunStatus:
    """Of a run that may be running, ended or dead; reads files only. `checkpoints`: where they are, if not beside."""
    if not (run_folder / "config.yaml").exists() and not (run_folder / HEALTH).exists():
        raise UserError(
            f"{run_folder} is not a run folder: it has neither config.yaml nor {HEALTH}/. Give the folder "
            "that `tinypod train` wrote to, e.g. runs/demo"
        )
    beats = heartbeat.read_heartbeats(run_folder / HEALTH)
    # Process 0 knows how many there are; others may be of an earlier start with more.
    count = max((beat.count for beat in beats if beat.process == 0), default=0)
    count = count or max((beat.count for beat in beats), default=0)
    beats = [beat for beat in beats if not count or beat.process < count]
    missing = sorted(set(range(count)) - {beat.process for beat in beats})
    where = checkpoint_steps(checkpoints or run_folder / "checkpoints")
    steps = _configured_steps(run_folder)
    return RunStatus(now, judge(beats, now), missing, steps, where, goodput.summarise(run_folder))


def judge(beats: list[Heartbeat], now: float) -> list[ProcessStatus]:
    """A verdict on each process, from all of them together."""
    readable = [beat for beat in beats if beat.unreadable is None]
    live = [beat for beat in readable if _alone(beat, now) == "ok"]  # not what an earlier start left behind
    if not readable:
        return [ProcessStatus(beat, 0, "unreadable") for beat in beats]
    furthest = max(live or readable, key=lambda beat: (beat.step, beat.time))
    typical_ms = statistics.median([beat.step_ms["p50"] for beat in readable if "p50" in beat.step_ms] or [0.0])
    statuses = []
    for beat in beats:
        lag = max(0, furthest.step - beat.step) if beat.unreadable is None else 0
        verdict = _alone(beat, now)
        if verdict == "ok" and lag > _STEPS_BETWEEN + _steps_since(beat, furthest):
            verdict = "lagging"
        elif verdict == "ok" and beat.step_ms.get("p50", -1.0) >= _SLOW * typical_ms:
            verdict = "slow"
        statuses.append(ProcessStatus(beat, lag, verdict))
    return statuses


def _alone(beat: Heartbeat, now: float) -> str:
    """The verdict on a process by its own heartbeat."""
    if beat.unreadable is not None:
        return "unreadable"
    if beat.ended is not None:
        return f"ended: {beat.ended}"
    if beat.is_gone():
        return "gone"
    return "silent" if beat.is_silent(now) else "ok"


def _steps_since(beat: Heartbeat, furthest: Heartbeat) -> float:
    """Steps that the furthest process may have done after this one wrote its heartbeat."""
    elapsed_s = max(0.0, furthest.time - beat.time)
    if "p50" not in furthest.step_ms:  # no step was timed yet: nothing to judge by
        return float("inf") if elapsed_s > 0 else 0.0
    return 1000 * elapsed_s / max(furthest.step_ms["p50"], 1e-3)


def summary(status: RunStatus) -> str:
    """One line."""
    processes = status.processes
    if not processes:
        return "no heartbeat: this run has not started yet"
    where = f"step {status.step:,}" + (f" of {status.steps:,}" if status.steps is not None else "")
    count, alive = len(processes) + len(status.missing), sum(process.alive for process in processes)
    if alive:
        behind = sum(process.verdict in ("lagging", "slow") for process in processes)
        stragglers = f", {behind} straggler{'s' if behind > 1 else ''}" if behind else ""
        dead = f", {count - alive} not alive" if count > alive else ""
        return f"running: {alive} of {count} process{'es' if count > 1 else ''}, {where}{stragglers}{dead}"
    readable = [process.heartbeat for process in processes if process.heartbeat.unreadable is None]
    if not readable:
        return "no heartbeat can be read"
    last = max(readable, key=lambda beat: beat.time)
    when = f"{datetime.fromtimestamp(last.time):%Y-%m-%d %H:%M:%S}, {duration(last.age(status.time))} ago"
    ends = {beat.ended for beat in readable}
    if ends == {"done"}:
        return f"done: {where}, ended {when}"
    return "; ".join([f"no process is alive: {where}, last seen {when}", *sorted(filter(None, ends - {"done"}))])


def render_status(status: RunStatus) -> RenderableType:
    parts: list[RenderableType] = [Text(summary(status), style="bold")]
    if status.processes:
        parts += [_table(status), *_notes(status)]
    if status.checkpoints:
        shown = ", ".join(f"{step:,}" for step in status.checkpoints[-5:])
        parts.append(Text(f"checkpoints: {'… ' if len(status.checkpoints) > 5 else ''}{shown}"))
    return Group(*parts, goodput_view.render(status.goodput))


def as_json(status: RunStatus) -> dict[str, Any]:
    """The same for programs."""
    processes = [
        {**process.heartbeat.model_dump(), "lag": process.lag, "verdict": process.verdict, "alive": process.alive}
        for process in status.processes
    ]
    spent = {"total_s": status.goodput.total_s, "goodput": status.goodput.goodput, **asdict(status.goodput)}
    running = any(process.alive for process in status.processes)
    known = {"time": status.time, "steps": status.steps, "missing": status.missing, "checkpoints": status.checkpoints}
    found = {"summary": summary(status), "running": running, "step": status.step}
    return {**found, **known, "processes": processes, "goodput": spent}


def _table(status: RunStatus) -> Listing:
    """Narrow columns; what needs words comes below."""
    columns = ("#", "host", "pid", "step", "lag", "phase", "for", "ms p50/p90/max", "seen", "verdict")
    table = Listing("", columns, left=("host", "phase", "verdict"), may_go=("pid", "host", "for", "ms p50/p90/max"))
    for process in status.processes:
        beat, style = (
            process.heartbeat,
            _STYLES.get(process.verdict, "red" if not process.heartbeat.ended else "yellow"),
        )
        verdict = Text("done" if beat.ended == "done" else process.verdict.partition(": ")[0], style=style)
        doing = (beat.phase, duration(status.time - beat.phase_since, whole=True)) if beat.ended is None else ("", "")
        times = "/".join(amount(beat.step_ms[name]) for name in ("p50", "p90", "max") if name in beat.step_ms)
        lag, seen = f"{process.lag:,}" if process.lag else "", duration(beat.age(status.time), whole=True)
        cells = [beat.host, str(beat.pid), f"{beat.step:,}", lag, *doing, times, seen]
        table.add_row(str(beat.process), *(cells if beat.unreadable is None else [""] * 8), verdict)
    for process_id in status.missing:
        table.add_row(str(process_id), *[""] * 8, Text("no heartbeat", style="red"))
    return table


def _notes(status: RunStatus) -> list[Text]:
    notes = []
    for process in status.processes:
        beat = process.heartbeat
        if beat.unreadable is not None:
            notes.append(f"process {beat.process}: its heartbeat cannot be read: {beat.unreadable}")
        elif beat.ended not in (None, "done"):
            notes.append(f"process {beat.process} {process.verdict}")
    return [Text(note, style="yellow") for note in notes]


def _configured_steps(run_folder: Path) -> int | None:
    """Without the schema: an older version's config has them too."""
    try:
        steps = yaml.safe_load((run_folder / "config.yaml").read_text())["steps"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def checkpoint_steps(where: Path | str) -> list[int]:
    with storage.explained(where):
        folder, remote = storage.folder(where), storage.is_remote(where)
        found = [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
        return sorted(int(path.name) for path in found if not remote or (path / storage.MARKER).exists())
