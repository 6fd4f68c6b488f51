"""Heartbeats: what each process last said about itself, and who is to blame when the others wait.

`health/process_3.json` is replaced every few seconds. It has the step, the phase and since when, step times, pid, host.
"""

import os
import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tinypod.errors import first_message
from tinypod.runs.storage import replace_file
from tinypod.runs.terminal import duration

SILENT_AFTER = 3  # heartbeats missed before a process counts as silent
DEADLINE, LOST_CONTACT = "deadline", "a computation over all processes failed"
_WAITED = (f"failed: {DEADLINE}", f"failed: {LOST_CONTACT}")  # ends of those who waited for another: not to blame


class Heartbeat(BaseModel):
    """What a process last said about itself. `ended`: None, "done", "stopped: SIGTERM" or "failed: why"."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")  # a newer version may say more

    process: int
    count: int = 0
    host: str = "?"
    pid: int = 0
    step: int = 0
    phase: str = "?"
    phase_since: float = 0.0
    time: float = 0.0
    every_s: float = 5.0
    step_ms: dict[str, float] = {}  # p50, p90, max
    ended: str | None = None
    unreadable: str | None = None  # why, where the file is damaged: then only `process` means anything

    @property
    def name(self) -> str:
        return f"process {self.process} (host {self.host}, pid {self.pid})"

    def age(self, now: float) -> float:
        return max(0.0, now - self.time)

    def is_silent(self, now: float) -> bool:
        return self.age(now) > SILENT_AFTER * self.every_s

    def is_gone(self) -> bool:
        """On this host, whether its process exists can be asked."""
        if self.host == socket.gethostname():
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
            except (PermissionError, OverflowError):  # another user's, or no process id
                return False
        return False

    def encode(self) -> bytes:
        return self.model_dump_json(exclude={"unreadable"}).encode() + b"\n"


def heartbeat_path(folder: Path, process: int) -> Path:
    return folder / f"process_{process}.json"


def write_heartbeat(folder: Path, beat: Heartbeat) -> None:
    replace_file(heartbeat_path(folder, beat.process), beat.encode())


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Of all processes, in order; a damaged file is a heartbeat that says so."""
    numbers = [path.stem.removeprefix("process_") for path in folder.glob("process_*.json")]
    return [read_heartbeat(folder, int(number)) for number in sorted(filter(str.isdecimal, numbers), key=int)]


def read_heartbeat(folder: Path, process: int) -> Heartbeat:
    try:
        beat = Heartbeat.model_validate_json(heartbeat_path(folder, process).read_bytes())
        why = None if beat.process == process else f"it is of process {beat.process}"
    except ValidationError as error:
        why = first_message(error)
    except OSError as error:
        why = str(error)
    return beat if why is None else Heartbeat(process=process, unreadable=why)


def suspects(beats: list[Heartbeat], count: int, now: float) -> list[str]:
    """Who keeps the others waiting: those gone or silent, else those furthest behind, else nobody in particular."""
    if texts := unwell(beats, count, now):
        return texts
    behind = min(beat.step for beat in beats)
    if any(beat.step > behind for beat in beats):
        return [
            f"{b.name} is the furthest behind; it is {b.phase} at step {b.step:,}" for b in beats if b.step == behind
        ]
    if count > 1:
        return ["none stands out: all are alive and at the same step; their stacks say where they wait"]
    return ["this process itself; its stack says where it waits"]


def unwell(beats: list[Heartbeat], count: int, now: float) -> list[str]:
    """Processes that cannot answer any more."""
    known = {beat.process for beat in beats}
    texts = [f"process {i} has no heartbeat: it never started, or cannot write" for i in range(count) if i not in known]
    for beat in beats:
        doing = f"it was {beat.phase} at step {beat.step:,}"
        if beat.unreadable is not None:
            texts.append(f"process {beat.process}: its heartbeat cannot be read: {beat.unreadable}")
        elif beat.ended is not None:
            if not beat.ended.startswith(_WAITED):
                texts.append(f"{beat.name} has ended ({beat.ended}); {doing}")
        elif beat.is_gone():
            texts.append(f"{beat.name} is gone (no such process); {doing}")
        elif beat.is_silent(now):
            texts.append(f"{beat.name} has been silent for {duration(beat.age(now), whole=True)}; {doing}")
    return texts


def describe(beat: Heartbeat, now: float) -> str:
    if beat.unreadable is not None:
        return f"process {beat.process}: unreadable heartbeat"
    ended = f", ended: {beat.ended}" if beat.ended else ""
    seen = f"last heartbeat {duration(beat.age(now), whole=True)} ago"
    return f"{beat.name}: {beat.phase} at step {beat.step:,}, {seen}{ended}"
