"""Fixed-shape passes over a split. The last batch is filled up with rows that count for nothing, so that every puzzle
counts exactly once and one compiled program does it all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tinypod import sharding
from tinypod.data.puzzles import Split
from tinypod.data.views import IGNORED_LABEL
from tinypod.experiment import Experiment
from tinypod.models import trm
from tinypod.tasks import puzzle

Progress = Callable[[int], None]  # puzzles done since the last call
QUEUED = 2  # batches that may wait on the device before the host does
REFINED_AT_ONCE = 256  # puzzles


class Evaluator:
    """Scores parameters on one split; compiled once, used at every evaluation of a run."""

    def __init__(
        self,
        experiment: Experiment,
        split: Split,
        batch_size: int,
        halt_steps: int | None = None,
        limit: int | None = None,
    ) -> None:
        self.split, self.rows = split, min(len(split), limit or len(split))
        shards = sharding.num_row_shards(experiment.mesh)
        self.batch_size = -(-min(batch_size, self.rows) // shards) * shards
        self.sources = experiment.info.sources
        self._by_rows = sharding.by_rows(experiment.mesh)
        score = make_score(
            experiment.config.model,
            halt_steps or experiment.config.task.halting.max_steps,
            len(self.sources),
            experiment.gather,
        )
        self._score = jax.jit(score, out_shardings=sharding.replicated(experiment.mesh))

    def __call__(self, params: trm.Params, progress: Progress | None = None) -> dict[str, float]:
        """Metrics over all rows, and by source where there are several."""
        totals: list[dict[str, Array]] = []
        for start in range(0, self.rows, self.batch_size):
            totals.append(self._score(params, self._batch(start)))
            if len(totals) > QUEUED:
                jax.block_until_ready(totals[-1 - QUEUED])
            if progress is not None:
                progress(min(self.batch_size, self.rows - start))
        fetched = jax.device_get(totals)
        sums = {name: np.asarray([t[name] for t in fetched], np.float64).sum(axis=0) for name in fetched[0]}
        assert sums["puzzles"].sum() == self.rows
        return name_metrics(sums, self.sources)

    def _batch(self, start: int) -> dict[str, Array]:
        split, stop = self.split, min(start + self.batch_size, self.rows)
        fill = self.batch_size - (stop - start)

        def padded(values: np.ndarray, dtype: Any) -> np.ndarray:
            rows = values[start:stop].astype(dtype)
            return np.pad(rows, [(0, fill)] + [(0, 0)] * (rows.ndim - 1))

        labels = padded(split.labels, np.int32)
        batch = {
            "inputs": padded(split.inputs, np.int32),
            "labels": np.where(labels == 0, IGNORED_LABEL, labels),
            "identifiers": padded(split.identifiers, np.int32),
            "sources": padded(split.sources, np.int32),
            "counts": padded(np.ones(len(split)), np.float32),
        }
        return sharding.put(batch, self._by_rows)


def make_score(
    model: trm.TrmConfig, halt_steps: int, num_sources: int, gather: sharding.Gather | None = None
) -> Callable[[trm.Params, dict[str, Array]], dict[str, Array]]:
    """`(params, batch) -> sums [num_sources]`. Every row runs all the steps; the last answer is the one that counts."""

    def score(params: trm.Params, batch: dict[str, Array]) -> dict[str, Array]:
        logits, q, stopped = run_steps(model, params, batch["inputs"], batch["identifiers"], halt_steps, gather)
        scores = puzzle.score(logits, q[:, 0], batch["labels"])
        counts = batch["counts"]
        values = {name: scores[name] * counts for name in puzzle.METRICS} | {
            "steps": stopped.astype(jnp.float32) * counts,
            "puzzles": counts,
        }
        source = jax.nn.one_hot(batch["sources"], num_sources, dtype=jnp.float32)
        return {name: jnp.sum(value[:, None] * source, axis=0) for name, value in values.items()}

    return score


def run_steps(
    model: trm.TrmConfig,
    params: trm.Params,
    inputs_BS: Array,
    identifiers_B: Array,
    steps: int,
    gather: sharding.Gather | None = None,
) -> tuple[Array, Array, Array]:
    """`steps` steps from scratch: the last logits and q, and the step [B] at which each row would have stopped."""
    B, S = inputs_BS.shape
    table = params.get(puzzle.TABLE)
    rows = None if table is None else table[identifiers_B]

    def advance(number: Array, state: Any) -> Any:
        z, _, _, stopped = state
        z, logits, q = trm.apply(model, params, z, inputs_BS, rows, gather)
        return z, logits, q, jnp.where(q[:, 0] > 0, jnp.minimum(stopped, number), stopped)

    logits = jnp.zeros((B, S, params["head"].shape[1]), model.dtype)
    start = (trm.initial_z(model, params, B, S), logits, jnp.zeros((B, 2)), jnp.full((B,), steps, jnp.int32))
    _, logits, q, stopped = jax.lax.fori_loop(1, steps + 1, advance, start)
    return logits, q, stopped


def name_metrics(sums: dict[str, np.ndarray], sources: list[str]) -> dict[str, float]:
    """`exact_accuracy` over everything, `exact_accuracy/NAME` for each of several sources."""
    names = (*puzzle.METRICS, "steps")
    count = sums["puzzles"]
    metrics = {name: float(sums[name].sum() / count.sum()) for name in names} | {"puzzles": float(count.sum())}
    present = [i for i in range(len(sources)) if count[i]]
    if len(present) > 1:
        for i in present:
            metrics |= {f"{name}/{sources[i]}": float(sums[name][i] / count[i]) for name in names}
            metrics[f"puzzles/{sources[i]}"] = float(count[i])
    return metrics


def refine(
    experiment: Experiment, params: trm.Params, inputs_BS: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """The answer (tokens [steps, B, S]) and the halting probability ([steps, B]) after each step."""
    model = experiment.config.model

    def run(params: trm.Params, inputs: Array) -> tuple[Array, Array]:
        table = params.get(puzzle.TABLE)
        rows = None if table is None else table[jnp.zeros(inputs.shape[0], jnp.int32)]

        def advance(z: trm.Z, _: None) -> tuple[trm.Z, tuple[Array, Array]]:
            z, logits, q = trm.apply(model, params, z, inputs, rows, experiment.gather)
            return z, (jnp.argmax(logits, axis=-1), jax.nn.sigmoid(q[:, 0]))

        return jax.lax.scan(advance, trm.initial_z(model, params, *inputs.shape), length=steps)[1]

    compiled, parts = jax.jit(run), range(0, len(inputs_BS), REFINED_AT_ONCE)
    done = [jax.device_get(compiled(params, jnp.asarray(inputs_BS[i : i + REFINED_AT_ONCE], jnp.int32))) for i in parts]
    answers, halting = (np.concatenate(column, axis=1) for column in zip(*done, strict=True))
    return answers, halting
