"""A task's pass over a split in fixed shapes: one compiled program, the last batch padded with rows that count for
nothing, so that every row counts exactly once."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from tinypod import sharding
from tinypod.tasks.task import Evaluation, Tree

Progress = Callable[[int], None]  # rows done since the last call
QUEUED = 2  # batches that may wait on the device before the host does


class Pass:
    """Sums of `score(params, batch)` over the rows of a split; `put` brings a batch to where it is scored."""

    def __init__(
        self,
        evaluation: Evaluation,
        score: Any,
        put: Callable[[Tree], Tree],
        batch_size: int,
        limit: int | None,
        *,
        multiple_of: int = 1,
    ) -> None:
        self.evaluation, self.rows = evaluation, min(evaluation.rows, limit or evaluation.rows)
        at_once = max(batch_size // evaluation.copies, 1)
        self.batch_size = -(-min(at_once, self.rows) // multiple_of) * multiple_of
        self._score, self._put = score, put

    def compile(self, params: Tree) -> None:
        """Ahead of the loop, in which nothing may compile. `params`: arrays, or their shapes with shardings."""
        self._score = self._score.lower(params, self._batch(0)).compile()

    def sums(self, params: Tree, progress: Progress | None) -> dict[str, np.ndarray]:
        totals: list[dict[str, Array]] = []
        for start in range(0, self.rows, self.batch_size):
            totals.append(self._score(params, self._batch(start)))
            if len(totals) > QUEUED:
                jax.block_until_ready(totals[-1 - QUEUED])
            if progress is not None:
                progress(min(self.batch_size, self.rows - start))
        fetched = jax.device_get(totals)
        return {name: np.asarray([t[name] for t in fetched], np.float64).sum(axis=0) for name in fetched[0]}

    def summarise(self, sums: dict[str, np.ndarray]) -> dict[str, float]:
        assert sums["count"].sum() == self.rows, "a row was counted twice, or not at all"
        return self.evaluation.summarise(sums)

    def _batch(self, start: int) -> Tree:
        stop = min(start + self.batch_size, self.rows)
        batch = self.evaluation.read(start, stop) | {"count": np.ones(stop - start, np.float32)}
        padding = self.batch_size - (stop - start)
        return self._put({name: np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()})


class Evaluator(Pass):
    """Scores parameters on one split."""

    def __init__(
        self, evaluation: Evaluation, mesh: Mesh, specs: Tree, batch_size: int, limit: int | None = None
    ) -> None:
        """`specs`: of the parameters."""
        over_batch = sharding.over_batch(mesh)
        score = jax.jit(sharding.in_stages(mesh, specs, evaluation.score), out_shardings=sharding.replicated(mesh))
        shards = sharding.num_batch_shards(mesh) * mesh.shape["pipeline"]
        super().__init__(
            evaluation, score, lambda batch: sharding.put(batch, over_batch), batch_size, limit, multiple_of=shards
        )

    def __call__(self, params: Tree, progress: Progress | None = None) -> dict[str, float]:
        return self.summarise(self.sums(params, progress))
