"""Goodput: where a run's wall time went, over all its restarts. `goodput.json` in the run folder, by process 0.

A run is a list of attempts, one for each start. The time of an attempt is divided by phase; what JAX itself reports as
tracing and compiling moves from the phase it happened in to `compiling`. Two kinds are known only afterwards, so they
are computed when summed up: `lost`, the stepping whose steps a later attempt had to do again (or that a rollback took
back), and `down`, the time between the last sign of life of an attempt that crashed or was preempted and the next
start. After an attempt that was done, or that a person stopped, nobody waited: that gap is not counted.
"""

import itertools
import json
import logging
import math
import socket
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
from pydantic import BaseModel, ValidationError

from tinypod.health.heartbeat import first_message
from tinypod.runs.storage import replace_file

logger = logging.getLogger(__name__)

FILE = "goodput.json"
_WRITE_INTERVAL_S = 3.0
LOST, DOWN = "lost", "down"  # the kinds besides the phases
# Disjoint parts of a compile, as JAX times them; the last one is XLA's own.
_TRACE, _LOWER, _BACKEND = (
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
_CACHE_HIT, _CACHE_MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


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


class Ledger:
    """The books of this attempt, kept by process 0. `Health` enters the phases and writes the file now and then.

    A start that ends before `begin` leaves no entry, and the file as it was: after a crash its time counts as `down`.
    """

    def __init__(self, folder: Path, processes: int = 1) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()  # never held while a file is written: the loop would wait for a hung disk
        self._io_lock = threading.Lock()
        self._thread = threading.get_ident()
        self.begun = self._warned = False
        self._kind, self._entered = "starting", time.monotonic()
        self._written_at = -math.inf
        self._earlier: list[Attempt] = []
        now = time.time()
        self._attempt = Attempt(started=now, written=now, host=socket.gethostname(), processes=processes)
        self._seconds = self._attempt.seconds = defaultdict(float)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def begin(self, restored_step: int) -> None:
        """The step that this attempt resumes from; 0: a new run."""
        devices = jax.devices()
        self._earlier = self._read_or_set_aside()
        with self._lock:
            self._attempt.first_step = self._attempt.last_step = restored_step
            self._attempt.devices, self._attempt.device_kind = len(devices), devices[0].device_kind
        self.begun = True
        self.write(now=True)

    def enter(self, kind: str) -> None:
        """From now on, time counts as this kind."""
        with self._lock:
            self._account()
            self._kind = kind

    def advance(self, step: int) -> None:
        """The step that the run is at."""
        with self._lock:
            if self.begun and step > self._attempt.last_step:
                self._attempt.steps_done += step - self._attempt.last_step
                self._attempt.last_step = step

    def rolled_back(self, from_step: int, to_step: int, seconds: float) -> None:
        """Steps done in this attempt that were taken back, and the stepping they took."""
        with self._lock:
            self._attempt.steps_done += max(0, from_step - self._attempt.last_step)
            self._attempt.last_step = to_step
            self._attempt.first_step = min(self._attempt.first_step, to_step)  # perhaps before where it began
            self._attempt.lost_s += seconds
            self._attempt.rollbacks += 1

    def compiled(self, step_bytes: int | None) -> None:
        """What the compiled step needs on a device; None where the backend does not say."""
        with self._lock:
            self._attempt.step_bytes = step_bytes

    def end(self, how: str, step: int) -> None:
        """The last entry; a second call changes nothing."""
        if self._attempt.ended is not None:
            return
        self.advance(step)
        with self._lock:
            self._attempt.ended = how
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)
        self.write(now=True)

    def write(self, *, now: bool = False) -> None:
        """To the file, after `begin`, at most every few seconds unless `now`. A full disk is reported once."""
        if not self.begun or (not now and time.monotonic() - self._written_at < _WRITE_INTERVAL_S):
            return
        self._written_at = time.monotonic()
        try:
            with self._io_lock:
                replace_file(self.path, self.encode())
        except OSError as error:
            if not self._warned:
                logger.warning(
                    "%s cannot be written: %s. Training continues; its goodput will be wrong.", self.path, error
                )
            self._warned = True

    def encode(self) -> bytes:
        """The file's content; after `begin`, because it asks the devices."""
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        with self._lock:
            self._account()
            self._attempt.written = time.time()
            self._attempt.peak_bytes = max(filter(None, (s.get("peak_bytes_in_use") for s in stats)), default=None)
            attempts = [attempt.model_dump() for attempt in (*self._earlier, self._attempt)]
        return json.dumps({"version": 1, "attempts": attempts}).encode() + b"\n"

    def _account(self) -> None:
        now = time.monotonic()
        self._seconds[self._kind] += now - self._entered
        self._entered = now

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event not in (_TRACE, _LOWER, _BACKEND):
            return
        with self._lock:
            if event == _BACKEND:
                self._attempt.compiles += 1
                self._attempt.compile_s += duration_secs
            if threading.get_ident() == self._thread and self._kind != "compiling":  # others cost the loop no time
                self._account()
                moved = min(duration_secs, self._seconds[self._kind])
                self._seconds[self._kind] -= moved
                self._seconds["compiling"] += moved

    def _on_event(self, event: str, **_: Any) -> None:
        with self._lock:
            self._attempt.cache_hits += event == _CACHE_HIT
            self._attempt.cache_misses += event == _CACHE_MISS

    def _read_or_set_aside(self) -> list[Attempt]:
        try:
            return read_attempts(self.path.parent)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            names = itertools.chain([f"{FILE}.damaged"], (f"{FILE}.damaged.{n}" for n in itertools.count(1)))
            aside = next(path for path in map(self.path.with_name, names) if not path.exists())
            logger.warning("%s is damaged (%s); set aside as %s, a new one begins", self.path, error, aside.name)
            with suppress(OSError):
                self.path.replace(aside)
            return []


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
