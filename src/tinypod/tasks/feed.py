"""Feeds: what the step is given for the batch of a number.

`ResidentFeed` gives the same device arrays each time, from which the step draws. `HostFeed` gives the rows of a batch,
read on the hosts: each process reads only the rows of its own devices, a few batches ahead, in one thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tinypod import sharding

HostRows = Callable[[int, int, int], Mapping[str, np.ndarray]]  # (batch number, start, stop) -> these rows of the batch


class ResidentFeed:
    """Arrays that are replicated on all devices."""

    def __init__(self, mesh: Mesh, arrays: Mapping[str, Any]) -> None:
        self._arrays = sharding.put(dict(arrays), sharding.replicated(mesh))

    def __call__(self, number: int) -> Any:
        return self._arrays

    def close(self) -> None:
        pass


class HostFeed:
    """Rows of a batch split over the devices. `read` must be a pure function: a batch may be asked for again."""

    def __init__(self, mesh: Mesh, batch_size: int, read: HostRows, ahead: int = 2) -> None:
        self._sharding, self._batch_size, self._read, self._ahead = sharding.over_batch(mesh), batch_size, read, ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tinypod-feed")
        self._reading: OrderedDict[int, Future[Any]] = OrderedDict()

    def __call__(self, number: int) -> Any:
        wanted = range(number, number + 1 + self._ahead)
        for passed in [known for known in self._reading if known not in wanted]:  # after a rollback, too
            self._reading.pop(passed).cancel()
        for ahead in wanted:
            if ahead not in self._reading:
                self._reading[ahead] = self._pool.submit(self._read_batch, ahead)
        return self._reading[number].result()

    def _read_batch(self, number: int) -> Any:
        return read_batch(self._sharding, self._batch_size, self._read, number)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def read_batch(rows: NamedSharding, batch_size: int, read: HostRows, number: int) -> dict[str, jax.Array]:
    """One batch as global arrays; a span of rows that several devices hold is read once."""
    spans: dict[tuple[int, int], Mapping[str, np.ndarray]] = {}

    def part(name: str, index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(batch_size)
        if (start, stop) not in spans:
            spans[start, stop] = read(number, start, stop)
        return spans[start, stop][name]

    def place(name: str, some: np.ndarray) -> jax.Array:
        shape = (batch_size, *some.shape[1:])
        return jax.make_array_from_callback(shape, rows, lambda index: part(name, index))

    index = next(iter(rows.addressable_devices_indices_map((batch_size,)).values()))
    assert index is not None
    start, stop, _ = index[0].indices(batch_size)
    spans[start, stop] = read(number, start, stop)
    return {name: place(name, some) for name, some in spans[start, stop].items()}
