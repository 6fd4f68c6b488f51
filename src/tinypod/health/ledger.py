"""The books of goodput (`goodput.py`), kept by process 0 of a run that trains."""

import itertools
import json
import logging
import math
import socket
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from tinypod.health.goodput import FILE, Attempt, read_attempts
from tinypod.runs.storage import replace_file

logger = logging.getLogger(__name__)

_WRITE_INTERVAL_S = 3.0
# Disjoint parts of a compile, as JAX times them; the last one is XLA's own.
_TRACE, _LOWER, _BACKEND = (
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
_CACHE_HIT, _CACHE_MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


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
