"""One owner of a run in an object store: a small file with the owner's name, written only if nobody else was first.

No lock can be held in a bucket; but a store writes an object on the condition that it is still the one that was read
(`ifGenerationMatch`). So of two that start, one is refused. The owner renews the lease with its heartbeat. One that was
not renewed for `LAPSE_S` has lapsed and may be taken over; its old owner notices at its next renewal, or before its
next checkpoint, and ends. Clocks of machines may differ by seconds, not by minutes.

Who owns: TINYPOD_OWNER, where somebody starts the same run again on other machines and knows that the old ones are gone
(a pod, a JobSet, a Slurm job); else this user on this machine, where the folder's own lock tells processes apart. The
same owner takes its own lease over at once.
"""

import getpass
import json
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tinypod.cluster.agreement import end_now
from tinypod.errors import UserError
from tinypod.runs import storage
from tinypod.runs.folder import Run, lock
from tinypod.runs.terminal import duration

OWNER = "TINYPOD_OWNER"
FILE = "owner.lock"  # no small file of the run (`folder._is_small_file`): never copied
LAPSE_S = 150.0  # several renewals, with a store that refuses for a minute


class LeaseError(UserError):
    """Somebody else owns the run."""


@dataclass(frozen=True)
class Holder:
    """What the file says."""

    owner: str
    nonce: str  # of one start of the owner: told apart from another by the same one
    renewed: float  # Unix seconds

    @classmethod
    def read(cls, content: bytes) -> "Holder | None":
        try:
            found = json.loads(content)
            return cls(str(found["owner"]), str(found["nonce"]), float(found["renewed"]))
        except (ValueError, KeyError, TypeError):  # not ours, or cut off by nobody knows whom
            return None


def this_owner() -> str:
    """`ada@laptop`, with the machine's number: names of machines repeat."""
    if os.environ.get(OWNER):
        return os.environ[OWNER]
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without users
        user = "unknown"
    return f"{user}@{socket.gethostname()} ({uuid.getnode():x})"


class Lease:
    """The right to write into a run. `take` it, `renew` it, `release` it; `hold` does all three. `lost(why)` is called
    once when somebody took it over."""

    def __init__(
        self,
        url: str,
        owner: str | None = None,
        file: str = FILE,
        lost: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url, self.file, self.owner, self.lost = url, file, owner or this_owner(), lost
        self.nonce = secrets.token_hex(8)
        self._clock, self._lock = clock, threading.Lock()
        self._generation: bytes | None = None
        self._taken: str | None = None  # why it is no longer ours
        self.renewed_at = 0.0

    def take(self) -> None:
        """Or an error with the holder's name."""
        with self._lock, storage.explained(f"{self.url}/{self.file}"):
            holder, generation = self._read()
            if holder is not None and holder.owner != self.owner and self._left(holder) > 0:
                raise self.refused(holder)
            if not self._write(generation):
                holder, _ = self._read()
                raise self.refused(holder)

    def holder(self) -> Holder | None:
        """Who has it now; None if nobody, or if it has lapsed."""
        with storage.explained(f"{self.url}/{self.file}"):
            holder, _ = self._read()
            return holder if holder is not None and self._left(holder) > 0 else None

    def renew(self) -> None:
        """An error if somebody took it over: then nothing may be written any more."""
        with self._lock, storage.explained(f"{self.url}/{self.file}"):
            if self._generation is not None and not self._write(self._generation):
                self._generation, self._taken = None, self._why_lost(self._read()[0])
                if self.lost is not None:
                    self.lost(self._taken)
        if self._taken is not None:
            raise LeaseError(self._taken)

    def check(self) -> None:
        """Before something is written for good, and with each heartbeat: renews one that is not fresh."""
        if self._taken is not None or self._clock() - self.renewed_at > LAPSE_S / 8:
            self.renew()

    def release(self) -> None:
        with self._lock:
            generation, self._generation = self._generation, None
            if generation is not None:
                with suppress(Exception):  # it lapses by itself
                    self._store().write(self.file, None, if_equal=generation).result()

    @contextmanager
    def hold(self, every_s: float) -> Iterator["Lease"]:
        """Take it, and give it back at the end; a thread renews it, for those who have no heartbeat."""
        self.take()
        stop = threading.Event()

        def keep() -> None:
            while not stop.wait(every_s):
                try:
                    self.renew()
                except LeaseError:
                    return
                except UserError:  # a store that is away: the next renewal may reach it
                    continue

        thread = threading.Thread(target=keep, name="tinypod-lease", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join(storage.retry_s())
            self.release()

    def _left(self, holder: Holder) -> float:
        return LAPSE_S - (self._clock() - holder.renewed)

    def refused(self, holder: Holder | None) -> LeaseError:
        if holder is None:
            return LeaseError(f"{self.url}: somebody else started it at the same moment; look who, and start again")
        left = max(self._left(holder), 1.0)
        return LeaseError(
            f"{self.url}: this run belongs to {holder.owner}, which renewed its lease "
            f"{duration(max(0.0, self._clock() - holder.renewed))} ago. Stop it there, or choose another --run. If "
            f"that machine is gone, the lease lapses in {duration(left)}; then start again"
        )

    def _why_lost(self, holder: Holder | None) -> str:
        by = f"{holder.owner} took it over" if holder is not None else "its lease was removed"
        return (
            f"{self.url}: this run no longer belongs to {self.owner}: {by}. Nothing more is written from here. "
            f"A lease lapses when it is not renewed for {LAPSE_S:.0f} s (a frozen machine, a store that was away)"
        )

    def _read(self) -> tuple[Holder | None, bytes]:
        found = self._store().read(self.file).result()
        return Holder.read(bytes(found.value)), found.stamp.generation

    def _write(self, generation: bytes) -> bool:
        """Whether it was written: only if the object is still that generation."""
        now = self._clock()
        content = json.dumps({"owner": self.owner, "nonce": self.nonce, "renewed": now}).encode()
        store = self._store()
        written = store.write(self.file, content, if_equal=generation).result().generation
        if not written:  # refused; or the answer to our own write was lost, and the store was asked again
            found = store.read(self.file).result()
            if bytes(found.value) != content:
                return False
            written = found.stamp.generation
        self._generation, self.renewed_at = written, now
        return True

    def _store(self) -> Any:
        import tensorstore

        storage.connect()
        bucket, _, path = storage.url_of(self.url).removeprefix(storage.SCHEME).partition("/")
        context = tensorstore.Context({"gcs_request_retries": storage.tensorstore_retries()})
        spec = {"driver": "gcs", "bucket": bucket, "path": f"{path}/" if path else ""}
        return tensorstore.KvStore.open(spec, context=context).result()


def _end_without_saving(why: str) -> None:
    """Somebody else owns the run by now: whatever this process still wrote would ruin it."""
    os.write(2, f"error: {why}\n".encode())
    end_now(UserError.exit_code)


@contextmanager
def own(
    run: Run, owner: str | None = None, lost: Callable[[str], None] | None = _end_without_saving
) -> Iterator[Lease | None]:
    """The right to train a run: locked on this host and, in an object store, leased. Whatever is copied there meanwhile
    is copied by its owner, or not at all. An error if somebody else has it (`LockedError`, `LeaseError`)."""
    with lock(run):
        if run.remote is None:
            yield None
            return
        lease = Lease(run.remote, owner, lost=lost)
        lease.take()
        run.guards.append(lease.check)
        try:
            yield lease
        finally:
            run.guards.remove(lease.check)
            lease.release()
