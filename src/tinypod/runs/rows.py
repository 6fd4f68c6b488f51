"""When the sums that steps return are fetched and become rows of metrics.

The row of a step is written once the devices have the steps after it to do: they never wait for the host to write one.
Who is about to do something else with a step (evaluate, save, stop) has its row written first.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tinypod.health.nonfinite import BadSteps

QUEUED = 2  # dispatches that may wait on the device before the host does: more would delay signals and deadlines
# (step, sums of each step since the last row) -> the steps that ask for a rollback, if these do
Write = Callable[[int, list[dict[str, float]]], BadSteps | None]


class Rows:
    """Those of the steps after `step`."""

    def __init__(self, step: int, write: Write, beat: Callable[[], None]) -> None:
        self._write, self._beat = write, beat
        self.restart(step)

    def restart(self, step: int) -> None:
        """Forget what was not written: the run went back to this step."""
        self.last = step  # that a row was written of
        self._owed = step
        self._fetched: list[dict[str, float]] = []  # of the steps since the last row
        self._waiting: deque[tuple[int, dict[str, jax.Array]]] = deque()

    def add(self, count: int, sums: dict[str, jax.Array]) -> None:
        """What a dispatch of so many steps returns: scalars, or arrays of at least so many."""
        self._waiting.append((count, sums))
        while len(self._waiting) > QUEUED:
            self._fetch()

    def owe(self, step: int) -> None:
        """A row of the steps up to this one."""
        self._owed = step

    def settle(self) -> BadSteps | None:
        """Write the row that is owed, if one is."""
        while self.last + len(self._fetched) < self._owed:
            self._fetch()
        if not self._fetched or self.last == self._owed:
            return None
        parts, self._fetched = self._fetched, []
        self.last = self._owed
        return self._write(self.last, parts)

    def finish(self, step: int) -> BadSteps | None:
        """Write all that there is, up to the last step; but not what comes after steps that ask for a rollback."""
        bad = self.settle()
        if bad is None:
            self.owe(step)
            bad = self.settle()
        return bad

    def _fetch(self) -> None:
        """The only transfer from the device in the loop; waits for it."""
        count, sums = self._waiting.popleft()
        self._fetched += _by_step(count, jax.device_get(sums))
        self._beat()  # the devices did these: a deadline is for one dispatch, not for all that are queued


def _by_step(count: int, sums: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    columns = [x.reshape(-1)[:count].tolist() for x in sums.values()]
    return [dict(zip(sums, values, strict=True)) for values in zip(*columns, strict=True)]
