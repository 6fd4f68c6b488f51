"""What puzzles are scored with: the accuracies of a batch, and a pass over a split. Every row runs all the steps; the
last answer is the one that counts."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tinypod.data.puzzles import Split
from tinypod.data.views import IGNORED_LABEL
from tinypod.models import trm
from tinypod.sharding import Gather
from tinypod.tasks.task import Evaluation, Metric

TABLE = "puzzle_table"
HEADLINE = (
    Metric("exact_accuracy", "exact", "max", ".2%"),
    Metric("cell_accuracy", "cells", "max", ".2%"),
    Metric("halt_accuracy", "halting", "max", ".2%"),
    Metric("steps", "mean steps", "min", ".2f"),
)
ACCURACIES = ("cell_accuracy", "exact_accuracy", "halt_accuracy")


def score(logits_BSV: Array, q_halt_B: Array, labels_BS: Array) -> dict[str, Array]:
    """Per row: labelled cells, share of them right, whether all are, whether the halting logit knows it."""
    labelled = labels_BS != IGNORED_LABEL
    count = jnp.sum(labelled, axis=-1)
    right = jnp.sum(labelled & (jnp.argmax(logits_BSV, axis=-1) == labels_BS), axis=-1)
    exact = right == count
    return {
        "labelled": count,
        "cell_accuracy": right.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32),
        "exact_accuracy": exact.astype(jnp.float32),
        "halt_accuracy": ((q_halt_B >= 0) == exact).astype(jnp.float32),
    }


def evaluation(model: trm.TrmConfig, split: Split, sources: list[str], steps: int, gather: Gather | None) -> Evaluation:
    def read(start: int, stop: int) -> dict[str, np.ndarray]:
        labels = split.labels[start:stop].astype(np.int32)
        return {
            "inputs": split.inputs[start:stop].astype(np.int32),
            "labels": np.where(labels == 0, IGNORED_LABEL, labels),
            "identifiers": split.identifiers[start:stop].astype(np.int32),
            "sources": split.sources[start:stop].astype(np.int32),
        }

    return Evaluation(
        rows=len(split),
        read=read,
        score=make_score(model, steps, len(sources), gather),
        summarise=lambda sums: name_metrics(sums, sources),
    )


def make_score(
    model: trm.TrmConfig, steps: int, num_sources: int, gather: Gather | None = None
) -> Callable[[trm.Params, dict[str, Array]], dict[str, Array]]:
    """`(params, batch) -> sums [num_sources]`."""

    def score_batch(params: trm.Params, batch: dict[str, Array]) -> dict[str, Array]:
        logits, q, stopped = run_steps(model, params, batch["inputs"], batch["identifiers"], steps, gather)
        scores = score(logits, q[:, 0], batch["labels"])
        count = batch["count"]
        values = {name: scores[name] * count for name in ACCURACIES} | {
            "steps": stopped.astype(jnp.float32) * count,
            "count": count,
        }
        source = jax.nn.one_hot(batch["sources"], num_sources, dtype=jnp.float32)
        return {name: jnp.sum(value[:, None] * source, axis=0) for name, value in values.items()}

    return score_batch


def run_steps(
    model: trm.TrmConfig,
    params: trm.Params,
    inputs_BS: Array,
    identifiers_B: Array,
    steps: int,
    gather: Gather | None = None,
) -> tuple[Array, Array, Array]:
    """`steps` steps from scratch: the last logits and q, and the step [B] at which each row would have stopped."""
    B, S = inputs_BS.shape
    table = params.get(TABLE)
    rows = None if table is None else table[identifiers_B]

    def advance(number: Array, state: Any) -> Any:
        z, _, _, stopped = state
        z, logits, q = trm.apply(model, params, z, inputs_BS, rows, gather)
        return z, logits, q, jnp.where(q[:, 0] > 0, jnp.minimum(stopped, number), stopped)

    logits = jnp.zeros((B, S, params["head"].shape[1]), model.dtype)
    start = (trm.initial_z(model, params, B, S), logits, jnp.zeros((B, 2)), jnp.full((B,), steps, jnp.int32))
    _, logits, q, stopped = jax.lax.fori_loop(1, steps + 1, advance, start)
    return logits, q, stopped


def name_metrics(sums: Mapping[str, np.ndarray], sources: list[str]) -> dict[str, float]:
    """`exact_accuracy` over everything, `exact_accuracy/NAME` for each of several sources."""
    names = (*ACCURACIES, "steps")
    count = sums["count"]
    metrics = {name: float(sums[name].sum() / count.sum()) for name in names} | {"count": float(count.sum())}
    present = [i for i in range(len(sources)) if count[i]]
    if len(present) > 1:
        for i in present:
            metrics |= {f"{name}/{sources[i]}": float(sums[name][i] / count[i]) for name in names}
            metrics[f"count/{sources[i]}"] = float(count[i])
    return metrics
