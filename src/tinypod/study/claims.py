"""Which of several processes trains which runs of a study.

Processes that start the same study on the same folder or bucket, on one machine or many, share its runs: each chooses
some that nobody has, trains them, and comes back for more. A run belongs to the process that has its lock and its lease
(`runs/lease.py`). A process that dies loses them, at once on its own machine, after a while in a bucket, and whoever
comes back for more takes its runs. Nothing else is exchanged: there is no process that the others need.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from tinypod.cluster.agreement import end_now
from tinypod.errors import DeadlineError, UserError
from tinypod.runs.folder import LockedError, Run
from tinypod.runs.lease import LAPSE_S, Lease, LeaseError, own, this_owner

CHOOSING = "choosing.lock"
RETRY_S = 0.5
AT_ONCE = 16  # requests to a store
T = TypeVar("T")


@dataclass(frozen=True)
class Worker:
    """One of the processes that share a study."""

    number: int = 0
    count: int = 1

    @property
    def owner(self) -> str:
        """Of the leases it takes. On a pod the workers have TINYPOD_OWNER in common."""
        return f"{this_owner()}, worker {self.number} of a study"

    def most(self, free: int, num_devices: int, limit: int | None = None) -> int | None:
        """Of so many free runs, the most that this process takes at once: what is left is dealt out evenly, so the last
        packs are small ones and nobody waits long for the others. Devices are filled while there is enough."""
        if self.count == 1:
            return limit
        even = max(-(-free // self.count), 1)
        share = -(-even // num_devices) * num_devices if even > num_devices else even
        return share if limit is None else min(share, limit)


def at_once(function: Callable[[Run], T], places: Sequence[Run]) -> list[T]:
    """Of runs in a store: many requests at a time."""
    if len(places) < 2 or places[0].remote is None:
        return [function(place) for place in places]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(function, places))


@contextmanager
def choosing(study: Run, worker: Worker) -> Iterator[None]:
    """One process at a time looks at what is left and takes some of it. `claim` has the last word: this only keeps them
    from tearing each other's packs apart."""
    study.folder.mkdir(parents=True, exist_ok=True)
    with open(study.folder / CHOOSING, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if study.remote is None:
            yield
            return
        lease = Lease(study.remote, worker.owner, CHOOSING)
        while True:
            try:
                lease.take()
                break
            except LeaseError:  # they are quick; a dead one's lease lapses
                time.sleep(RETRY_S)
        try:
            yield
        finally:
            lease.release()


def is_free(place: Run, worker: Worker) -> bool:
    """Nobody trains it, as far as can be seen: only `claim` knows."""
    if place.is_locked():
        return False
    if place.remote is None:
        return True
    holder = Lease(place.remote, worker.owner).holder()
    return holder is None or holder.owner == worker.owner


def claim(stack: ExitStack, places: Sequence[Run], worker: Worker) -> list[bool]:
    """Which of the runs are ours, until the stack is left; brings them here from the store."""
    leases: list[Lease] = []

    def take(place: Run) -> AbstractContextManager[Lease | None] | None:
        owned = own(place, worker.owner, _start_again)
        try:
            lease = owned.__enter__()
        except (LockedError, LeaseError):
            return None
        leases.extend([lease] if lease is not None else [])
        return owned

    taken = at_once(take, places)
    for owned in filter(None, taken):
        stack.push(owned)
    if leases:
        stack.enter_context(_renewed(leases))
    ours = [owned is not None for owned in taken]
    at_once(
        lambda place: place.pull(locked=True), [place for place, is_ours in zip(places, ours, strict=True) if is_ours]
    )
    return ours


def _start_again(why: str) -> None:
    """A lease that lapsed is somebody else's now. There are other runs to train."""
    os.write(2, f"error: {why}\n".encode())
    end_now(DeadlineError.exit_code)


@contextmanager
def _renewed(leases: Sequence[Lease]) -> Iterator[None]:
    """A thread renews them: no heartbeat does while a run is set up, and there may be hundreds."""
    stop = threading.Event()

    def renew(lease: Lease) -> None:
        with suppress(UserError):  # a store that is away: the next renewal may reach it
            lease.renew()

    def keep() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while not stop.wait(LAPSE_S / 5):
                list(pool.map(renew, leases))

    thread = threading.Thread(target=keep, name="tinypod-leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
