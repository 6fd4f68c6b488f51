"""Health: what this process is doing and for how long it may.

At any time a process is in one *phase*. The phase has a deadline (config), stands in the process's heartbeat, and is
what goodput counts.

Two daemon threads, not one: the first writes files, which can hang with the file system; the second only watches the
clock, touches no file before a deadline has passed, and ends the process even if saying why hangs. Its clock does not
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
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tinypod.errors import DeadlineError
from tinypod.experiment import HealthConfig
from tinypod.health import heartbeat
from tinypod.health.heartbeat import Heartbeat, read_heartbeats, write_heartbeat
from tinypod.health.ledger import Ledger
from tinypod.runs.folder import HEALTH
from tinypod.runs.storage import first_line
from tinypod.runs.terminal import duration

logger = logging.getLogger(__name__)

Phase = Literal[
    "starting", "compiling", "restoring", "stepping", "evaluating", "saving", "data", "waiting", "closing", "ending"
]

_LATE_TICKS = 3  # a wait that lasts this many ticks too long: the process was frozen
_SAMPLES = 200  # step times that the percentiles are of
_PUBLISH_INTERVAL_S = 30.0  # an object store takes about one write a second to one name, and bills each
_LAST_WORDS_S = 10.0  # to say why, when even that may hang
_WAITING_EXTRA_S = 60.0  # a barrier's own deadline names who is missing, so it passes first
_RESUME = "Run it again to resume from the last checkpoint"

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

    Where this process's heartbeat says "done", nothing is written before `begin`: a finished run that turns out to have
    nothing left to do stays as it was. Any other start is seen at once. The ledger's entry always begins with `begin`.

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
    ) -> None:
        self.folder, self.process, self.count = folder, process, count
        self.config, self.ledger = config or HealthConfig(), ledger
        self.current: Phase = "starting"
        self._publish, self._fetch = publish, fetch
        self._lock = threading.Lock()  # phase, since and ledger change together
        self._io_lock = threading.Lock()
        self._since = time.time()
        self._step = 0
        self._beats = 0  # any change resets the clock; counting is cheaper than asking the time
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._ended: str | None = None
        self._warned = False
        self._published_at = -math.inf
        self._held = False  # nothing is written yet
        self._tick_s = min(1.0, *(deadline(self.config, phase)[0] / 8 for phase in _TIMEOUTS))
        self._age, self._seen, self._looked_at = 0.0, 0, time.monotonic()
        self._stop_writing, self._stop_watching = threading.Event(), threading.Event()
        self._writer = threading.Thread(target=self._keep_writing, name="tinypod-heartbeat", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="tinypod-deadline", daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        self._fetch_others()
        self._held = heartbeat.read_heartbeat(self.folder, self.process).ended == "done"
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
        if self.process == 0:  # of an earlier start with more processes
            with self._warning_once():
                for old in read_heartbeats(self.folder):
                    if old.process >= self.count:
                        heartbeat.heartbeat_path(self.folder, old.process).unlink(missing_ok=True)
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
                interrupted = isinstance(error, KeyboardInterrupt)
                self._ended = "stopped: SIGINT" if interrupted else f"failed: {first_line(error)}"
            self._ended = self._ended or "done"
            if self.ledger is not None:
                self.ledger.end(self._ended, self._step)
            self._published_at = -math.inf  # how it ended is always published
            self._write()
        self._stop_watching.set()
        self._watcher.join()

    def ends(self, how: str) -> None:
        """Say how this process is about to end, where it is not simply done: "stopped: SIGTERM"."""
        self._ended = how

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """What this process does now, by its own deadline; then the phase around it again, with a new clock."""
        outer = self.current
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(outer)

    def _enter(self, phase: Phase) -> None:
        with self._lock:
            self.current, self._since = phase, time.time()
            self._beats += 1
            if self.ledger is not None:
                self.ledger.enter(phase)

    def doing(self) -> tuple[Phase, float]:
        """The phase, and the seconds since it began."""
        with self._lock:
            return self.current, time.time() - self._since

    @property
    def step(self) -> int:
        return self._step

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
            seconds = (from_step - to_step) * _percentiles(self._samples).get("p50", 0.0) / 1000
            self.beat(to_step)
            if self.ledger is not None:
                self.ledger.rolled_back(from_step, to_step, seconds)

    def lost_contact(self, error: BaseException) -> str:
        """Why a computation over all processes failed: who is gone. Waits until a silent one counts as silent."""
        give_up_at = time.monotonic() + (heartbeat.SILENT_AFTER + 1) * self.config.heartbeat_s
        while not (blamed := self._blamed(heartbeat.unwell)) and time.monotonic() < give_up_at:
            self.beat()
            time.sleep(min(0.1, self._tick_s))
        blamed = blamed or ["none: all processes are alive, so the fault may be this one's own"]
        what = f"{heartbeat.LOST_CONTACT} at step {self._step:,} in {self._heartbeat().name}: {first_line(error)}"
        return "\n".join([what, *(f"suspect: {text}" for text in blamed), _RESUME])

    def _heartbeat(self) -> Heartbeat:
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
                step_ms=_percentiles(self._samples),
                ended=self._ended if self._stop_writing.is_set() else None,  # announced is not ended
            )

    def _keep_writing(self) -> None:
        while not self._stop_writing.wait(self.config.heartbeat_s):
            self._write()

    def _write(self) -> None:
        if self._held:
            return
        with self._io_lock, self._warning_once():  # the writer's, then at the end the loop's or the watcher's
            write_heartbeat(self.folder, self._heartbeat())
        if self.ledger is not None:
            with self._lock:
                self.ledger.advance(self._step)
            self.ledger.write()
        if self._publish is not None and time.monotonic() - self._published_at >= _PUBLISH_INTERVAL_S:
            self._published_at = time.monotonic()
            with self._warning_once():
                copy = self._heartbeat().model_copy(update={"every_s": _PUBLISH_INTERVAL_S})
                self._publish(f"{HEALTH}/process_{self.process}.json", copy.encode())
                if self.ledger is not None and self.ledger.begun:
                    self._publish(self.ledger.path.name, self.ledger.encode())

    @contextlib.contextmanager
    def _warning_once(self) -> Iterator[None]:
        """A heartbeat that cannot be written or fetched must not end the run that it watches."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                logger.warning(
                    "process %d: its heartbeat cannot be written: %s. Training continues.", self.process, error
                )
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
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        if self._seen != self._beats or elapsed > (1 + _LATE_TICKS) * self._tick_s:
            self._age, self._seen = 0.0, self._beats
            return False
        self._age += elapsed
        return self._age >= deadline(self.config, phase)[0] and self._seen == self._beats

    def _expire(self, phase: Phase) -> None:
        code = DeadlineError.exit_code
        last_words = threading.Timer(_LAST_WORDS_S, os._exit, [code])  # a hung disk or a full pipe: end all the same
        last_words.daemon = True
        try:
            last_words.start()
            # Reading the others' heartbeats may hang, so what is known without them comes first.
            me, key = self._heartbeat(), deadline(self.config, phase)[1]
            stacks = heartbeat.heartbeat_path(self.folder, self.process).with_suffix(".stack.txt")
            _say(
                f"error: {me.name} has been {phase} at step {me.step:,} for {duration(self._age)} without progress: "
                f"health.{key}={getattr(self.config, key):g} has passed\n"
            )
            _say(f"{self._verdict()}\n{_RESUME}. If {phase} may take that long, raise health.{key}\n")
            _say(f"The stacks, also in {stacks}:\n")
            faulthandler.dump_traceback(2, all_threads=True)
            with contextlib.suppress(OSError), open(stacks, "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            self._stop_writing.set()
            self._ended = f"failed: {heartbeat.DEADLINE}"  # also for a heartbeat that is being written just now
            self._write()
            if self.ledger is not None:
                self.ledger.end(self._ended, self._step)
        finally:
            last_words.cancel()
            os._exit(code)

    def _verdict(self) -> str:
        """Who does what, and who is to blame."""
        now = time.time()
        lines = [f"  {heartbeat.describe(beat, now)}" for beat in self._beats_of_all()] if self.count > 1 else []
        return "\n".join([*lines, *(f"suspect: {text}" for text in self._blamed(heartbeat.suspects))])

    def _blamed(self, judge: Callable[[list[Heartbeat], int, float], list[str]]) -> list[str]:
        if self._held and self.count > 1:
            return ["not known: the heartbeats of the others are of the last start, which was done"]
        return judge(self._beats_of_all(), self.count, time.time())

    def _beats_of_all(self) -> list[Heartbeat]:
        """The files of the others, and what this process knows of itself."""
        self._fetch_others()
        others = [b for b in read_heartbeats(self.folder) if b.process < self.count and b.process != self.process]
        return sorted([self._heartbeat(), *others], key=lambda beat: beat.process)

    def _fetch_others(self) -> None:
        if self._fetch is not None:
            with self._warning_once():
                self._fetch()


def _percentiles(samples: Collection[float]) -> dict[str, float]:
    if not samples:
        return {}
    ordered, last = sorted(samples), len(samples) - 1
    picked = {"p50": ordered[last // 2], "p90": ordered[round(0.9 * last)], "max": ordered[last]}
    return {name: round(value, 3) for name, value in picked.items()}


def _say(text: str) -> None:
    """Straight to the descriptor: the thread that hangs may hold the lock of sys.stderr."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
