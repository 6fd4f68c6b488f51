"""A supervisor: starts a run again that ended early, as long as that can help and the run gets further."""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from tinypod.cluster.launch import interrupts
from tinypod.errors import FINAL, LATER
from tinypod.runs.terminal import say

KILLED = 128 + signal.SIGKILL
GIVE_UP_AFTER_KILLS = 10
HINT = (
    "SIGKILL comes from outside the run: if you did not send it, the kernel's OOM killer may be the reason (`dmesg` "
    "says so), and the run needs more memory or a smaller batch"
)


@dataclass
class _Patience:
    """What happened since the run last got further."""

    next_wait_s: float
    failures: int = 0
    kills: int = 0
    waited_s: float = 0.0


def supervise(
    run_once: Callable[[], int],
    progress: Callable[[], int | None],
    *,
    console: Console,
    first_wait_s: float = 1.0,
    max_wait_s: float = 60.0,
    give_up_after: int = 3,
    storage_patience_s: float = 3600.0,
) -> int:
    """Call `run_once` until it ends for good; returns the last exit code.

    `progress` is the step that was reached under this supervisor: a run may have been further in an earlier life, and
    `--from-step` takes it back. Two ends are not the run's fault and have a patience of their own: SIGKILL, and
    storage that is full or away. A signal to this process ends it: at once while it waits, else with the run that it
    is passed on to.
    """
    furthest: int | None = None
    now = _Patience(first_wait_s)
    with interrupts() as signals:
        while True:
            code = run_once()
            if code in FINAL or signals.came:
                return code
            step = progress()
            if step is not None and (furthest is None or step > furthest):
                furthest, now = step, _Patience(first_wait_s)
            if code == KILLED:
                now.kills += 1
            elif code not in LATER or now.waited_s >= storage_patience_s:
                now.failures += 1
            where = "before its first step" if step is None else f"at step {step}"
            if now.failures >= give_up_after or now.kills >= GIVE_UP_AFTER_KILLS:
                times = now.kills if code == KILLED else now.failures
                say(
                    console,
                    f"gave up: the run ended {times} times {where}, at last with exit code {code}. "
                    + (f"{HINT}. " if code == KILLED else "")
                    + "What it printed each time is in its log files; docs/reliability.md explains the exit codes",
                    "bold red",
                )
                return code
            counted = f"{now.failures} of {give_up_after} failures"
            if now.kills:
                counted += f", {now.kills} of {GIVE_UP_AFTER_KILLS} kills"
            again = f"starting again in {now.next_wait_s:g} s ({counted} at this step)"
            say(console, f"the run ended with exit code {code} {where}; {again}", "yellow")
            signals.sleep(now.next_wait_s)
            if signals.came:
                return 128 + signals.came[0]
            now.waited_s += now.next_wait_s
            now.next_wait_s = min(2 * now.next_wait_s, max_wait_s)
