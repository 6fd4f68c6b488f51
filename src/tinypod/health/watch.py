"""Health: what each process is doing, for how long it may, and who is to blame when it takes longer.

At any time a process is in one *phase*. The phase has a deadline (config), stands in the process's heartbeat file, and
is what goodput counts. `health/process_3.json` is replaced every few seconds: step, phase, step times, pid, host.

Two daemon threads, not one: the first writes files, which can hang with the file system; the second only watches the
clock, touches no file before a deadline has passed, and ends the process even if telling why hangs. Its clock does not
count what this process could not see: after SIGSTOP or a suspended laptop the phase begins anew, because a frozen
process did not hang. A thread that holds Python's own lock for ever stops both; then the others name the process as
silent. (faulthandler's timer would see it, but would also end a process that was only frozen.)
"""

import contextlib
import faulthandler
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tinypod.errors import DeadlineError
from tinypod.experiment import HealthConfig
from tinypod.health.goodput import Ledger
from tinypod.runs.storage import replace_file

logger = logging.getLogger(__name__)

Phase = Literal["starting", "compiling", "restoring", "stepping", "evaluating", "saving", "data", "ending"]

FOLDER = "health"
SILENT_AFTER = 3  # heartbeats missed before a process counts as silent
_LATE_TICKS = 3  # a wait that lasts this many ticks too long: the process was frozen
_SAMPLES = 200  # step times that the percentiles are of
_PUBLISH_INTERVAL_S = 30.0  # an object store takes about one write a second to one name, and bills each
_LAST_WORDS_S = 10.0  # to say why, when even that may hang
_DEADLINE, _LOST_CONTACT = "deadline", "a computation over all processes failed"
_WAITED = (f"failed: {_DEADLINE}", f"failed: {_LOST_CONTACT}")  # ends of those who waited for another: not to blame

_TIMEOUTS: dict[Phase, str] = {
    "starting": "start_timeout_s",
    "compiling": "compile_timeout_s",
    "restoring": "restore_timeout_s",
    "stepping": "step_timeout_s",
    "evaluating": "evaluate_timeout_s",
    "saving": "save_timeout_s",
    "data": "start_timeout_s",
    "ending": "save_timeout_s",
}


@dataclass(frozen=True)
class Heartbeat:
    """What a process last said about itself. `ended`: None, "done", "stopped: SIGTERM" or "failed: why"."""

    process: int
    count: int = 0
    host: str = "?"
    pid: int = 0
    step: int = 0
    phase: str = "?"
    phase_since: float = 0.0
    time: float = 0.0
    every_s: float = 5.0
    step_ms: dict[str, float] = field(default_factory=dict)  # p50, p90, max
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
        return self.host == socket.gethostname() and not _is_alive(self.pid)


class Health:
    """The phases of this process, its heartbeat and its deadlines, from `__enter__` to `__exit__`.

    `phase`, `beat` and `timed` are for one thread, the loop's. `publish(name, data)` takes a copy of the heartbeat to
    where the run's folder is an object store; `fetch()` brings those of the other hosts from there.
    """

    def __init__(
        self,
        folder: Path,
        process: int = 0,
        count: int = 1,
        config: HealthConfig | None = None,
        ledger: Ledger | None = None,
        publish: Callable[[str, bytes], None] | None = None,
        fetch: Callable[[], None] | None = None,
        *,
        exit: Callable[[int], object] = os._exit,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.process, self.count = folder, process, count
        self.config, self.ledger = config or HealthConfig(), ledger
        self._publish, self._fetch, self._exit, self._monotonic = publish, fetch, exit, monotonic
        self._lock = threading.Lock()  # phase, since and ledger change together
        self._io_lock = threading.Lock()
        self._phases: list[Phase] = ["starting"]
        self._since = time.time()
        self._step = 0
        self._beats = 0  # any change resets the clock; counting is cheaper than asking the time
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._ended: str | None = None
        self._warned = False
        self._published_at = -math.inf
        shortest = min(self._timeout_s(phase) for phase in _TIMEOUTS)
        self._tick_s = min(1.0, shortest / 8)
        self._stop_writing, self._stop_watching = threading.Event(), threading.Event()
        self._writer = threading.Thread(target=self._write_on, name="tinypod-heartbeat", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="tinypod-deadline", daemon=True)

    @property
    def path(self) -> Path:
        return heartbeat_path(self.folder, self.process)

    @property
    def current(self) -> Phase:
        return self._phases[-1]

    def __enter__(self) -> Self:
        self._watcher.start()
        with self._complaining_once():
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.process == 0:  # of an earlier start with more processes
                for old in read_heartbeats(self.folder):
                    if old.process >= self.count:
                        heartbeat_path(self.folder, old.process).unlink(missing_ok=True)
        self._write()
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.phase("ending"):
            self._stop_writing.set()
            self._writer.join(self._timeout_s("ending"))
            if error is not None and (self._ended is None or not isinstance(error, KeyboardInterrupt | SystemExit)):
                self._ended = _how(error)
            self._ended = self._ended or "done"
            if self.ledger is not None:
                self.ledger.end(self._ended, self._step)
            self._published_at = -math.inf  # the last word always goes out
            self._write()
        self._stop_watching.set()
        self._watcher.join()

    def _timeout_s(self, phase: Phase) -> float:
        return float(getattr(self.config, _TIMEOUTS[phase]))

    def ends(self, how: str) -> None:
        """Say how this process is about to end, where it is not simply done: "stopped: SIGTERM"."""
        self._ended = how

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """What this process does now, by its own deadline; afterwards the phase around it goes on, with a new clock."""
        self._enter(lambda: self._phases.append(phase))
        try:
            yield
        finally:
            self._enter(lambda: self._phases.pop())

    def beat(self, step: int | None = None) -> None:
        """Progress: the phase's clock begins anew."""
        if step is not None:
            self._step = step
        self._beats += 1

    def timed(self, steps: int, seconds: float) -> None:
        """So many steps took so long: for the percentiles."""
        if steps > 0:
            with self._lock:
                self._samples.append(1000 * seconds / steps)

    def rolled_back(self, from_step: int, to_step: int, seconds: float) -> None:
        """Steps that were done, and are taken back; they took so many seconds."""
        with self._lock:
            self._step = to_step
            self._beats += 1
            if self.ledger is not None:
                self.ledger.rolled_back(from_step, to_step, seconds)

    def lost_contact(self, error: BaseException) -> str:
        """Why a computation over all processes failed: who is gone. Waits until a silent one can be told."""
        deadline = self._monotonic() + (SILENT_AFTER + 1) * self.config.heartbeat_s
        while not (blamed := _unwell(self._beats_of_all(), self.count, time.time())) and self._monotonic() < deadline:
            self.beat()
            time.sleep(min(0.1, self._tick_s))
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        blamed = blamed or ["none: all processes are alive, so the fault may be this one's own"]
        return "\n".join(
            [
                f"{_LOST_CONTACT} at step {self._step} in {self._heartbeat(None).name}: {first[:300]}",
                *(f"suspect: {text}" for text in blamed),
                "Start the same command again: it goes on from the last checkpoint",
            ]
        )

    def _enter(self, change: Callable[[], object]) -> None:
        with self._lock:
            change()
            self._since = time.time()
            self._beats += 1
            if self.ledger is not None:
                self.ledger.enter(self._phases[-1])

    def _heartbeat(self, ended: str | None) -> Heartbeat:
        with self._lock:
            return Heartbeat(
                process=self.process,
                count=self.count,
                host=socket.gethostname(),
                pid=os.getpid(),
                step=self._step,
                phase=self.current,
                phase_since=self._since,
                time=time.time(),
                every_s=self.config.heartbeat_s,
                step_ms=_percentiles(list(self._samples)),
                ended=ended,
            )

    def _write_on(self) -> None:
        while not self._stop_writing.wait(self.config.heartbeat_s):
            self._write()

    def _write(self) -> None:
        with self._io_lock:  # the writer's, then at the end the loop's or the watcher's
            data = _encode(self._heartbeat(self._ended_now()))
            with self._complaining_once():
                replace_file(self.path, data)
        if self.ledger is not None:
            with self._lock:
                self.ledger.advance(self._step)
            self.ledger.write()
        now = self._monotonic()
        if self._publish is not None and now - self._published_at >= _PUBLISH_INTERVAL_S:
            self._published_at = now
            with self._complaining_once():
                copy = replace(self._heartbeat(self._ended_now()), every_s=_PUBLISH_INTERVAL_S)
                self._publish(f"{FOLDER}/{self.path.name}", _encode(copy))
                if self.ledger is not None:
                    self._publish(self.ledger.path.name, self.ledger.encode())

    def _ended_now(self) -> str | None:
        return self._ended if self._stop_writing.is_set() else None  # announced is not ended

    @contextlib.contextmanager
    def _complaining_once(self) -> Iterator[None]:
        """A heartbeat that cannot be written must not end the run that it watches."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                logger.warning("process %d: its heartbeat cannot be written: %s. The run goes on.", self.process, error)
            self._warned = True

    def _watch(self) -> None:
        """Ends the process when its phase lasts too long without a beat."""
        age, seen, last = 0.0, self._beats, self._monotonic()
        while not self._stop_watching.wait(self._tick_s):
            now = self._monotonic()
            elapsed, last = now - last, now
            if seen != self._beats or elapsed > (1 + _LATE_TICKS) * self._tick_s:
                age, seen = 0.0, self._beats
                continue
            age += elapsed
            phase = self.current
            if age >= self._timeout_s(phase) and seen == self._beats:
                self._expire(phase, age)
                return

    def _expire(self, phase: Phase, age: float) -> None:
        code = DeadlineError.exit_code
        last_words = threading.Timer(_LAST_WORDS_S, self._exit, [code])  # a hung disk or a full pipe: end all the same
        last_words.daemon = True
        try:
            last_words.start()
            # Straight to the descriptor: the thread that hangs may hold the lock of sys.stderr. Reading the others'
            # heartbeats may hang as well, so what is known without them comes first.
            me, key = self._heartbeat(None), f"health.{_TIMEOUTS[phase]}"
            _say(
                f"error: {me.name} has been {phase} at step {me.step} for {age:.1f} s without progress: "
                f"{key}={self._timeout_s(phase):g} has passed\n"
            )
            _say(f"{self._verdict()}\nStart the same command again: it goes on from the last checkpoint. ")
            _say(f"If {phase} may take that long, raise {key}\nThe stacks, also in {self._stack_path}:\n")
            faulthandler.dump_traceback(_stderr(), all_threads=True)
            with contextlib.suppress(OSError), open(self._stack_path, "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            self._stop_writing.set()
            self._ended = f"failed: {_DEADLINE}"  # also for a heartbeat that is being written just now
            self._write()
            if self.ledger is not None:
                self.ledger.end(self._ended, self._step)
        finally:
            last_words.cancel()
            self._exit(code)

    @property
    def _stack_path(self) -> Path:
        return self.path.with_suffix(".stack.txt")

    def _verdict(self) -> str:
        """Who does what, and who is to blame."""
        now, beats = time.time(), self._beats_of_all()
        lines = [f"  {_line(beat, now)}" for beat in beats] if self.count > 1 else []
        return "\n".join([*lines, *(f"suspect: {text}" for text in suspects(beats, self.count, now))])

    def _beats_of_all(self) -> list[Heartbeat]:
        """The files of the others, and what this process knows of itself."""
        if self._fetch is not None:
            with self._complaining_once():
                self._fetch()
        others = [b for b in read_heartbeats(self.folder) if b.process < self.count and b.process != self.process]
        return sorted([self._heartbeat(None), *others], key=lambda beat: beat.process)


def suspects(beats: list[Heartbeat], count: int, now: float) -> list[str]:
    """Who keeps the others waiting: those gone or silent, else those furthest behind, else nobody can be told apart."""
    if texts := _unwell(beats, count, now):
        return texts
    behind = min(beat.step for beat in beats)
    if any(beat.step > behind for beat in beats):
        return [f"{b.name} is the furthest behind; it is {b.phase} at step {b.step}" for b in beats if b.step == behind]
    if count > 1:
        return ["none stands out: all are alive and at the same step; their stacks say where they wait"]
    return ["this process itself; its stack says where it waits"]


def _unwell(beats: list[Heartbeat], count: int, now: float) -> list[str]:
    """Processes that cannot answer any more."""
    known = {beat.process for beat in beats}
    texts = [f"process {i} has no heartbeat: it never started, or cannot write" for i in range(count) if i not in known]
    for beat in beats:
        doing = f"it was {beat.phase} at step {beat.step}"
        if beat.unreadable is not None:
            texts.append(f"process {beat.process}: its heartbeat cannot be read: {beat.unreadable}")
        elif beat.ended is not None:
            if not beat.ended.startswith(_WAITED):
                texts.append(f"{beat.name} has ended ({beat.ended}); {doing}")
        elif beat.is_gone():
            texts.append(f"{beat.name} is gone without a word; {doing}")
        elif beat.is_silent(now):
            texts.append(f"{beat.name} has been silent for {beat.age(now):.0f} s; {doing}")
    return texts


def heartbeat_path(folder: Path, process: int) -> Path:
    return folder / f"process_{process}.json"


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Of all processes, in order; a damaged file is a heartbeat that says so."""
    numbers = [path.stem.removeprefix("process_") for path in folder.glob("process_*.json")]
    return [_read(folder, int(number)) for number in sorted(filter(str.isdecimal, numbers), key=int)]


def _read(folder: Path, process: int) -> Heartbeat:
    try:
        values = json.loads(heartbeat_path(folder, process).read_bytes())
        if not isinstance(values, dict) or values.get("process") != process:
            raise ValueError("not a heartbeat of this process")
        known = {item.name: item for item in fields(Heartbeat)}
        for name, value in values.items():
            if name in known and not _fits(name, value):
                raise ValueError(f"{name} is {value!r}")
        return Heartbeat(**{name: value for name, value in values.items() if name in known})
    except (OSError, ValueError) as error:  # JSON and UTF-8 errors are ValueErrors too
        return Heartbeat(process, unreadable=str(error))


def _fits(name: str, value: Any) -> bool:
    if name in ("host", "phase"):
        return isinstance(value, str)
    if name in ("ended", "unreadable"):
        return value is None or isinstance(value, str)
    if name == "step_ms":
        return isinstance(value, dict) and all(isinstance(number, int | float) for number in value.values())
    return isinstance(value, int | float)


def _encode(beat: Heartbeat) -> bytes:
    values = asdict(beat)
    del values["unreadable"]
    return json.dumps(values).encode() + b"\n"


def _percentiles(samples: list[float]) -> dict[str, float]:
    if not samples:
        return {}
    ordered, last = sorted(samples), len(samples) - 1
    picked = {"p50": ordered[last // 2], "p90": ordered[round(0.9 * last)], "max": ordered[last]}
    return {name: round(value, 3) for name, value in picked.items()}


def _line(beat: Heartbeat, now: float) -> str:
    if beat.unreadable is not None:
        return f"process {beat.process}: unreadable heartbeat"
    ended = f", ended: {beat.ended}" if beat.ended else ""
    return f"{beat.name}: {beat.phase} at step {beat.step}, last heartbeat {beat.age(now):.1f} s ago{ended}"


def _how(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped: SIGINT"
    text = str(error).strip().splitlines()
    return f"failed: {(text[0] if text else type(error).__name__)[:300]}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _stderr() -> int:
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # replaced by an object without a file, or closed
        return 2


def _say(text: str) -> None:
    data = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(_stderr(), data) :]
