"""Goodput: where a run's wall time went, over all its restarts. `goodput.json` in the run folder, by process 0.

A run is a list of attempts, one for each start. The time of an attempt is divided by phase; what JAX itself reports as
tracing and compiling moves from the phase it happened in to `compiling`. Two kinds are known only afterwards, so they
are computed when summed up: `lost`, the stepping whose steps a later attempt had to do again (or that a rollback took
back), and `down`, the time between the last sign of life of an attempt that crashed or was preempted and the next
start. After an attempt that was done, or that a person stopped, nobody waited: that gap is not counted. `ledger.py`
writes the file; whoever only reads it does not wait for JAX.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from tinypod.errors import first_message

FILE = "goodput.json"
LOST, DOWN = "lost", "down"  # the kinds besides the phases


class Attempt(BaseModel):
    """One start of the run, as stored."""

    started: float  # Unix seconds
    written: float  # the last sign of life
    host: str = "?"
    processes: int = 1
    devices: int = 0
    device_kind: str = "?"
    seconds: dict[str, float] = {}  # by phase
    first_step: int = 0  # the one restored
    last_step: int = 0
    steps_done: int = 0  # with those rolled back
    lost_s: float = 0.0  # of `stepping`, taken back by rollbacks
    rollbacks: int = 0
    ended: str | None = None  # None: still running, or killed
    compiles: int = 0
    compile_s: float = 0.0  # in XLA, or loading from the persistent cache instead
    cache_hits: int = 0
    cache_misses: int = 0
    peak_bytes: int | None = None  # the fullest local device
    step_bytes: int | None = None  # that the compiled step needs on a device

    @property
    def interrupted(self) -> bool:
        """Ended against its will: what passes until the next start is lost."""
        return self.ended not in ("done", "stopped", "stopped: SIGINT")


class _File(BaseModel):
    version: Literal[1]
    attempts: list[Attempt]


def read_attempts(folder: Path) -> list[Attempt]:
    """FileNotFoundError where there is no ledger, ValueError where it is damaged or something else."""
    data = (folder / FILE).read_bytes()
    try:
        return _File.model_validate_json(data).attempts
    except ValidationError as error:
        raise ValueError(first_message(error)) from None


@dataclass(frozen=True)
class Goodput:
    """A run's time over all attempts."""

    seconds: dict[str, float] = field(default_factory=dict)  # by kind, `lost` and `down` among them; only what is > 0
    attempts: int = 0
    lost_steps: int = 0
    rollbacks: int = 0
    compiles: int = 0
    compile_s: float = 0.0
    cache_hits: int = 0
    peak_bytes: int | None = None
    step_bytes: int | None = None
    hardware: str | None = None  # of the last attempt
    unreadable: str | None = None

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps that were kept."""
        return self.share("stepping")

    def share(self, kind: str) -> float:
        return self.seconds.get(kind, 0.0) / self.total_s if self.total_s > 0 else 0.0


def summarise(folder: Path) -> Goodput:
    """Of a run's folder; no ledger reads as no attempts, a damaged one says so."""
    try:
        attempts = read_attempts(folder)
    except FileNotFoundError:
        return Goodput()
    except (OSError, ValueError) as error:
        return Goodput(unreadable=f"{folder / FILE}: {error}")
    seconds = dict.fromkeys(("stepping", LOST, DOWN), 0.0)
    lost_steps = 0
    for number, attempt in enumerate(attempts):
        lost, lost_s = _lost(attempt, attempts[number + 1 :])
        lost_steps += lost
        for kind, value in attempt.seconds.items():
            seconds[kind] = seconds.get(kind, 0.0) + value
        seconds["stepping"] -= lost_s
        seconds[LOST] += lost_s
        if number > 0 and attempts[number - 1].interrupted:
            seconds[DOWN] += max(0.0, attempt.started - attempts[number - 1].written)
    return Goodput(
        seconds={kind: value for kind, value in seconds.items() if value > 0},
        attempts=len(attempts),
        lost_steps=lost_steps,
        rollbacks=sum(attempt.rollbacks for attempt in attempts),
        compiles=sum(attempt.compiles for attempt in attempts),
        compile_s=sum(attempt.compile_s for attempt in attempts),
        cache_hits=sum(attempt.cache_hits for attempt in attempts),
        peak_bytes=max((a.peak_bytes for a in attempts if a.peak_bytes is not None), default=None),
        step_bytes=next((a.step_bytes for a in reversed(attempts) if a.step_bytes is not None), None),
        hardware=_hardware(attempts[-1]) if attempts else None,
    )


def _lost(attempt: Attempt, later: list[Attempt]) -> tuple[int, float]:
    """Steps that a later attempt went back before or a rollback took back, and their share of the stepping."""
    stepping = attempt.seconds.get("stepping", 0.0)
    rolled_back_s = min(attempt.lost_s, stepping)
    net = attempt.last_step - attempt.first_step
    kept_to = min((a.first_step for a in later), default=attempt.last_step)
    lost = min(max(0, attempt.last_step - kept_to), net)
    share = lost / net if net > 0 else 0.0
    return lost + max(0, attempt.steps_done - net), rolled_back_s + share * (stepping - rolled_back_s)


def _hardware(attempt: Attempt) -> str:
    hosts = f" in {attempt.processes} processes" if attempt.processes > 1 else ""
    return f"{attempt.devices} × {attempt.device_kind}{hosts}"
