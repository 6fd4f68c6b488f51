"""Stopping a run well: all its processes after the same step, with a checkpoint.

Ctrl-C is answered at once (`interrupts.py`): what it waits for, and what a second one would do.

SIGTERM never skips the save, however often it comes: schedulers send it to a supervisor and its children at once, and
the supervisor passes its own on. Only a second SIGINT does, which is a person at a terminal who does not want to wait.
"""

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jax._src import distributed as jax_distributed  # private: the preemption service has no public door

from tinypod.cluster.agreement import Cluster
from tinypod.cluster.interrupts import heard

NOTIFIER_S = 2.0
# By the phase that it comes in (health.watch): what is waited for.
_WAITS = {
    "starting": "stopping once the start is over",
    "data": "stopping once the data are read",
    "restoring": "stopping once the state to begin with is there",
    "compiling": "stopping once the compiler is done, which cannot be interrupted",
    "waiting": "stopping once the other processes are here",
    "stepping": "stopping after this step, then saving a checkpoint",
    "evaluating": "stopping in the middle of the evaluation, then saving step {step:,}",
    "evaluating all": "stopping after this evaluation, then saving step {step:,} of every run",
    "saving": "stopping once step {step:,} is saved",
    "closing": "stopping already: closing the logs, step {step:,} is saved",
    "ending": "ending already, step {step:,} is saved",
}


def answer(phase: str, step: int, saved: int) -> str:
    """To Ctrl-C: what it waits for, and what a second one would do. `saved`: the last step that is on disk."""
    lost = f"and loses what came after step {saved:,}" if step > saved else "and loses nothing"
    return f"{_WAITS[phase].format(step=step)}; Ctrl-C again ends at once {lost}"


class Preemption:
    """Stands in JAX's place for its preemption service, so that only `Stop` moves its counter.

    The service knows one number, that of the last call, and Orbax calls it with steps while the loop calls it with
    counts: a notice in such a moment would set a stopping point that nobody ever reaches.
    """

    service: Any = None
    calls = itertools.count(1)  # one for the process: the service must never see the same number twice

    @classmethod
    def take_over(cls) -> None:
        cls.service = jax_distributed.global_state.preemption_sync_manager
        assert cls.service is not None, "jax_enable_preemption_service is off"
        jax_distributed.global_state.preemption_sync_manager = cls()

    @classmethod
    def reached(cls) -> bool:
        return bool(cls.service.reached_sync_point(next(cls.calls)))

    def reached_sync_point(self, step: int) -> bool:
        """What Orbax asks whenever it saves."""
        return False

    def shutdown(self) -> None:
        self.service.shutdown()


@dataclass
class Stop:
    """Whether the run was asked to end: by a signal, or by a notice of preemption to any of its processes."""

    cluster: Cluster = field(default_factory=Cluster)
    by: signal.Signals | None = None
    answer: Callable[[], str] = lambda: "stopping; Ctrl-C again ends at once"  # to the first SIGINT
    agreed_at: float = -math.inf

    def requested(self) -> bool:
        """True on all processes at the same call, and from then on. All of them must call it equally often."""
        if self.by is None and self.cluster.count > 1 and Preemption.reached():
            # What is left is to save. SIGTERM does not reach all hosts at the same moment: a later one must neither end
            # a process that saves nor wake JAX's notifier, which a shutdown then crashes.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.by, self.agreed_at = signal.SIGTERM, time.monotonic()
        return self.by is not None

    def note(self, number: int, _: object) -> None:
        """The handler of SIGINT and SIGTERM in a process of its own."""
        self.by = self.by or signal.Signals(number)

    def tell_all(self, number: int, _: object) -> None:
        """The handler of SIGINT in a cluster: the others hear of it as of a SIGTERM."""
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def stop_on_signals(cluster: Cluster, say: Callable[[str], None] = lambda text: None) -> Iterator[Stop]:
    """SIGINT and SIGTERM end the run after the current step, with a checkpoint; a second SIGINT ends it at once.
    `say` is called from a thread, with the answer to the first SIGINT.

    In a cluster SIGTERM belongs to JAX: since `start`, a handler of its own in C++ notes it, broadcasts it
    within a second, and lets them agree on the call of `requested` at which all stop. A handler of Python's here would
    silence that. What does not stop is ended by the deadlines, by the launcher, or by SIGKILL. Cloud TPU announces
    maintenance and preemption by SIGTERM, too (for TPU VMs made with autocheckpoint on): SIGTERM is tested with real
    processes, the notice of a real TPU is not.
    """
    stop = Stop(cluster)
    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread handle signals
        yield stop
        return
    handlers = {signal.SIGINT: stop.note, signal.SIGTERM: stop.note}
    if cluster.count > 1:
        handlers = {signal.SIGINT: stop.tell_all}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with heard(lambda: say(stop.answer())):
            yield stop
    finally:
        # A SIGTERM of this process's own may have come just before: JAX's notifier sees it within a second, and crashes
        # if that is during the shutdown. A save usually takes longer anyway.
        time.sleep(max(0.0, stop.agreed_at + NOTIFIER_S - time.monotonic()))
        for number, handler in previous.items():
            if number == signal.SIGINT or stop.by is None:  # one that stopped is still to end, whoever is impatient
                signal.signal(number, handler)
