"""Health: what this process is doing and for how long it may.

At any time a process is in one *phase*. The phase has a deadline (config), stands in the process's heartbeat, and is
what goodput counts.

Two daemon threads, not one: the first writes files, which can hang with the file system; the second only watches the
clock, touches no file before a deadline has passed, and ends the process even if telling why hangs. Its clock does not
count what this process could not see: after SIGSTOP or a suspended laptop the phase begins anew, because a frozen
process did not hang. A thread that holds Python's own lock for ever stops both; then the others name the process as
silent. (faulthandler's timer would see it, but would also end a process that was only frozen.)
"""

import contextlib
import faulthandler
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tinypod.errors import DeadlineError
from tinypod.experiment import HealthConfig
from tinypod.health.goodput import Ledger
from tinypod.health.heartbeat import (
    DEADLINE,
    FOLDER,
    LOST_CONTACT,
    SILENT_AFTER,
    Heartbeat,
    describe,
    heartbeat_path,
    read_heartbeat,
    read_heartbeats,
    suspects,
    unwell,
    write_heartbeat,
)

logger = logging.getLogger(__name__)

Phase = Literal[
    "starting", "compiling", "restoring", "stepping", "evaluating", "saving", "data", "waiting", "closing", "ending"
]

_LATE_TICKS = 3  # a wait that lasts this many ticks too long: the process was frozen
_SAMPLES = 200  # step times that the percentiles are of
_PUBLISH_INTERVAL_S = 30.0  # an object store takes about one write a second to one name, and bills each
_LAST_WORDS_S = 10.0  # to say why, when even that may hang
_WAITING_EXTRA_S = 60.0  # a barrier's own deadline names who is missing, so it passes first

_TIMEOUTS: dict[Phase, str] = {
    "starting": "start_timeout_s",
    "compiling": "compile_timeout_s",
    "restoring": "restore_timeout_s",
    "stepping": "step_timeout_s",
    "evaluating": "evaluate_timeout_s",
    "saving": "save_timeout_s",
    "data": "start_timeout_s",
    "closing": "close_timeout_s",
    "ending": "save_timeout_s",
}


def deadline(config: HealthConfig, phase: Phase) -> tuple[float, str]:
    """The seconds that a phase may last without a beat, and the key that says so."""
    if phase == "waiting":  # for the other processes, whatever they do: longer than the longest
        seconds, key = max(deadline(config, other) for other in _TIMEOUTS)
        return seconds + _WAITING_EXTRA_S, key
    return float(getattr(config, _TIMEOUTS[phase])), _TIMEOUTS[phase]


class Health:
    """The phases of this process, its heartbeat and its deadlines, from `__enter__` to `__exit__`.

    A run that is done keeps its last word until it really goes on: where this process's heartbeat says "done", nothing
    is written before `begin`. (Until then the processes cannot see each other; any other start is seen at once.) The
    ledger's entry begins with `begin` in any case.

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
        self._held = False  # nothing is written yet
        shortest_s = min(deadline(self.config, phase)[0] for phase in _TIMEOUTS)
        self._tick_s = min(1.0, shortest_s / 8)
        self._age, self._seen, self._looked_at = 0.0, 0, monotonic()
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
        if self._fetch is not None:
            with self._complaining_once():
                self._fetch()
        self._held = read_heartbeat(self.folder, self.process).ended == "done"
        if not self._held:
            self._start_writing()
        return self

    def begin(self, step: int) -> None:
        """The run was restored at this step, and will be trained or evaluated."""
        self.beat(step)
        if self.ledger is not None:
            self.ledger.begin(step)
        if self._held:
            self._held = False
            self._start_writing()

    def _start_writing(self) -> None:
        with self._complaining_once():
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.process == 0:  # of an earlier start with more processes
                for old in read_heartbeats(self.folder):
                    if old.process >= self.count:
                        heartbeat_path(self.folder, old.process).unlink(missing_ok=True)
        self._write()
        self._writer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.phase("ending"):
            self._stop_writing.set()
            if not self._held:
                self._writer.join(deadline(self.config, "ending")[0])
            if error is not None and (self._ended is None or not isinstance(error, KeyboardInterrupt | SystemExit)):
                self._ended = _how(error)
            self._ended = self._ended or "done"
            if self.ledger is not None:
                self.ledger.end(self._ended, self._step)
            self._published_at = -math.inf  # the last word always goes out
            self._write()
        self._stop_watching.set()
        self._watcher.join()

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

    def rolled_back(self, from_step: int, to_step: int) -> None:
        """Steps that were done, and are taken back; they took as long as steps usually do."""
        with self._lock:
            seconds = (from_step - to_step) * _percentiles(list(self._samples)).get("p50", 0.0) / 1000
            self._step = to_step
            self._beats += 1
            if self.ledger is not None:
                self.ledger.rolled_back(from_step, to_step, seconds)

    def lost_contact(self, error: BaseException) -> str:
        """Why a computation over all processes failed: who is gone. Waits until a silent one can be told."""
        give_up_at = self._monotonic() + (SILENT_AFTER + 1) * self.config.heartbeat_s
        while not (blamed := self._blamed(unwell)) and self._monotonic() < give_up_at:
            self.beat()
            time.sleep(min(0.1, self._tick_s))
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        blamed = blamed or ["none: all processes are alive, so the fault may be this one's own"]
        return "\n".join(
            [
                f"{LOST_CONTACT} at step {self._step} in {self._heartbeat(None).name}: {first[:300]}",
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
        if self._held:
            return
        with self._io_lock, self._complaining_once():  # the writer's, then at the end the loop's or the watcher's
            write_heartbeat(self.folder, self._heartbeat(self._ended_now()))
        if self.ledger is not None:
            with self._lock:
                self.ledger.advance(self._step)
            self.ledger.write()
        now = self._monotonic()
        if self._publish is not None and now - self._published_at >= _PUBLISH_INTERVAL_S:
            self._published_at = now
            with self._complaining_once():
                copy = self._heartbeat(self._ended_now()).model_copy(update={"every_s": _PUBLISH_INTERVAL_S})
                self._publish(f"{FOLDER}/{self.path.name}", copy.encode())
                if self.ledger is not None and self.ledger.begun:
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
        while not self._stop_watching.wait(self._tick_s):
            phase = self.current
            if self._is_late(phase):
                self._expire(phase)
                return

    def _is_late(self, phase: Phase) -> bool:
        """One look at the clock, a tick after the last one."""
        now = self._monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        if self._seen != self._beats or elapsed > (1 + _LATE_TICKS) * self._tick_s:
            self._age, self._seen = 0.0, self._beats
            return False
        self._age += elapsed
        return self._age >= deadline(self.config, phase)[0] and self._seen == self._beats

    def _expire(self, phase: Phase) -> None:
        code = DeadlineError.exit_code
        last_words = threading.Timer(_LAST_WORDS_S, self._exit, [code])  # a hung disk or a full pipe: end all the same
        last_words.daemon = True
        try:
            last_words.start()
            # Straight to the descriptor: the thread that hangs may hold the lock of sys.stderr. Reading the others'
            # heartbeats may hang as well, so what is known without them comes first.
            me, key = self._heartbeat(None), deadline(self.config, phase)[1]
            _say(
                f"error: {me.name} has been {phase} at step {me.step} for {self._age:.1f} s without progress: "
                f"health.{key}={getattr(self.config, key):g} has passed\n"
            )
            _say(f"{self._verdict()}\nStart the same command again: it goes on from the last checkpoint. ")
            _say(f"If {phase} may take that long, raise health.{key}\nThe stacks, also in {self._stack_path}:\n")
            faulthandler.dump_traceback(_stderr(), all_threads=True)
            with contextlib.suppress(OSError), open(self._stack_path, "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            self._stop_writing.set()
            self._ended = f"failed: {DEADLINE}"  # also for a heartbeat that is being written just now
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
        now = time.time()
        lines = [f"  {describe(beat, now)}" for beat in self._beats_of_all()] if self.count > 1 else []
        return "\n".join([*lines, *(f"suspect: {text}" for text in self._blamed(suspects))])

    def _blamed(self, judge: Callable[[list[Heartbeat], int, float], list[str]]) -> list[str]:
        if self._held and self.count > 1:
            return ["not known: the heartbeats of the others are of the last start, which was done"]
        return judge(self._beats_of_all(), self.count, time.time())

    def _beats_of_all(self) -> list[Heartbeat]:
        """The files of the others, and what this process knows of itself."""
        if self._fetch is not None:
            with self._complaining_once():
                self._fetch()
        others = [b for b in read_heartbeats(self.folder) if b.process < self.count and b.process != self.process]
        return sorted([self._heartbeat(None), *others], key=lambda beat: beat.process)


def _percentiles(samples: list[float]) -> dict[str, float]:
    if not samples:
        return {}
    ordered, last = sorted(samples), len(samples) - 1
    picked = {"p50": ordered[last // 2], "p90": ordered[round(0.9 * last)], "max": ordered[last]}
    return {name: round(value, 3) for name, value in picked.items()}


def _how(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped: SIGINT"
    text = str(error).strip().splitlines()
    return f"failed: {(text[0] if text else type(error).__name__)[:300]}"


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
