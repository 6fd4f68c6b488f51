"""What the processes of a run do together: agree on a value, wait for each other, end.

Two things around JAX's coordination service are ours, for reasons that were observed: its barriers name only some of
those that are missing, in prose; and a process that simply exits after a failure waits at JAX's shutdown barrier for
peers that cannot come, then aborts all of them, so that its exit code and their messages are lost (`end_now`).
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
from jax._src import distributed as jax_distributed  # private: its client has no public door

from tinypod.errors import DeadlineError, StorageError


@dataclass(frozen=True)
class Cluster:
    """The processes of this run, seen from one of them. One process alone is a cluster, too."""

    index: int = 0
    count: int = 1
    _calls: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_primary(self) -> bool:
        """The process that prints and writes what is written once."""
        return self.index == 0

    def broadcast(self, name: str, value: Any, timeout_s: float) -> Any:
        """Process 0's value, as JSON, on all; waits for all. Every process must call it equally often with a name."""
        if self.count == 1:
            return value
        key = self._key("broadcast", name)
        if self.is_primary:
            _client().key_value_set(key, json.dumps(value))
        else:
            try:
                value = json.loads(_client().blocking_key_value_get(key, _milliseconds(timeout_s)))
            except jax.errors.JaxRuntimeError as error:
                raise self._late(name, timeout_s, {0}, error) from None
        self.barrier(name, timeout_s)  # all have read it
        if self.is_primary:
            _client().key_value_delete(key)
        return value

    def barrier(self, name: str, timeout_s: float) -> None:
        """Until all processes are here. Names may be used again."""
        if self.count == 1:
            return
        arrived = self._key("barrier", name)  # JAX names only some of those that are missing, in prose
        _client().key_value_set(f"{arrived}/{self.index}", "here")
        try:
            _client().wait_at_barrier(arrived, _milliseconds(timeout_s))
        except jax.errors.JaxRuntimeError as error:
            present = {int(key.rsplit("/", 1)[1]) for key, _ in _client().key_value_dir_get(arrived)}
            raise self._late(name, timeout_s, set(range(self.count)) - present, error) from None
        if self.is_primary:
            _client().key_value_delete(arrived)

    def in_primary(self, name: str, work: Callable[[], Any], timeout_s: float) -> Any:
        """What the work returns in process 0, broadcast to all; if it fails there, it fails in all."""
        value, error = None, None
        if self.is_primary:
            try:
                value = work()
            except Exception as caught:
                error = caught
        value, failed = self.broadcast(name, (value, repr(error) if error else ""), timeout_s)
        if error is not None:
            raise error
        if failed:
            raise StorageError(f"{name}: process 0 could not do its part: {failed}")
        return value

    def shutdown(self, timeout_s: float) -> None:
        """The end of a run that went well, or stopped well: waits for the others. Else: `end_now`."""
        if self.count > 1:
            self.barrier("shutdown", timeout_s)  # JAX's own barrier would abort; this one says who is missing
            jax.distributed.shutdown()

    def _key(self, use: str, name: str) -> str:
        """A key for this call: a name that is used again must not meet what is left of the call before."""
        call = self._calls[use + name] = self._calls.get(use + name, 0) + 1
        return f"tinypod/{use}/{name}/{call}"

    def _late(self, name: str, timeout_s: float, missing: Collection[int], error: Exception) -> DeadlineError:
        if not missing:
            return DeadlineError(
                f"process {self.index} came to `{name}` too late: the others had waited for {timeout_s:g} s and gave up"
            )
        if "DEADLINE_EXCEEDED" not in str(error):
            return DeadlineError(
                f"process {self.index} at `{name}`: the processes no longer reach each other "
                f"({str(error).splitlines()[0]}); not there yet: {listed(missing)}. Look at their logs"
            )
        return DeadlineError(
            f"{self.count - len(missing)} of {self.count} processes came to `{name}` within {timeout_s:g} s; "
            f"missing: {listed(missing)}. Look at its log for what it is doing, then start all of them again"
        )


def listed(processes: Collection[int]) -> str:
    """`process 2, process 5`."""
    return ", ".join(f"process {index}" for index in sorted(processes))


def end_now(exit_code: int) -> NoReturn:
    """End a process of a cluster after a failure, without JAX's shutdown barrier (see above)."""
    sys.stdout.flush()
    sys.stderr.flush()
    if jax_distributed.global_state.service is not None:
        time.sleep(1)  # without process 0 JAX aborts the others at once: let them say what they saw
    os._exit(exit_code)


def _client() -> Any:
    return jax_distributed.global_state.client


def _milliseconds(seconds: float) -> int:
    return math.ceil(1000 * seconds)


def is_started() -> bool:
    """Whether this process has joined a cluster of several."""
    return _client() is not None
