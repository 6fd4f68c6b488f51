"""What puzzles are scored with: the accuracies of a batch, and a pass over a split. The answer
after the last step is the one that counts. What is thought, and what that costs: `puzzle_thinking`."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tinypod.data.puzzles import Split
from tinypod.data.views import IGNORED_LABEL
from tinypod.models import trm
from tinypod.tasks.puzzle_thinking import Thought, stop_logit
from tinypod.tasks.task import Evaluation, Metric

HEADLINE = (
    Metric("exact_accuracy", "exact", "max", ".2%"),
    Metric("cell_accuracy", "cells", "max", ".2%"),
    Metric("halt_accuracy", "halting", "max", ".2%"),
    Metric("steps", "mean steps", "min", ".2f"),
    Metric("cost", "cost in steps", "min", ",.1f"),
)
ACCURACIES = ("cell_accuracy", "exact_accuracy", "halt_accuracy")


def score(answers_BS: Array, q_halt_B: Array, labels_BS: Array) -> dict[str, Array]:
    """Per row: labelled cells, share of them right, whether all are, whether the halting logit knows it."""
    labelled = labels_BS != IGNORED_LABEL
    count = jnp.sum(labelled, axis=-1)
    right = jnp.sum(labelled & (answers_BS == labels_BS), axis=-1)
    exact = right == count
    return {
        "labelled": count,
        "cell_accuracy": right.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32),
        "exact_accuracy": exact.astype(jnp.float32),
        "halt_accuracy": ((q_halt_B >= 0) == exact).astype(jnp.float32),
    }


def evaluation(
    think: Callable[[trm.Params, Array, Array], Thought],
    split: Split,
    sources: list[str],
    *,
    copies: int = 1,
    continues: bool = False,
) -> Evaluation:
    """`copies`: rows that `think` makes of one."""

    def read(start: int, stop: int) -> dict[str, np.ndarray]:
        labels = split.labels[start:stop].astype(np.int32)
        return {
            "inputs": split.inputs[start:stop].astype(np.int32),
            "labels": np.where(labels == 0, IGNORED_LABEL, labels),
            "identifiers": split.identifiers[start:stop].astype(np.int32),
            "sources": split.sources[start:stop].astype(np.int32),
        }

    def score_batch(params: trm.Params, batch: dict[str, Array]) -> dict[str, Array]:
        """Sums [sources]."""
        answers, q, cost = think(params, batch["inputs"], batch["identifiers"])
        scores = score(answers[-1].astype(jnp.int32), q[-1, :, 0], batch["labels"])
        stops = (stop_logit(q, continues=continues) > 0).at[-1].set(True)
        values = {name: scores[name] for name in ACCURACIES} | {
            "steps": 1 + jnp.argmax(stops, axis=0).astype(jnp.float32),
            "cost": cost,
            "count": jnp.ones_like(batch["count"]),
        }
        source = jax.nn.one_hot(batch["sources"], len(sources), dtype=jnp.float32) * batch["count"][:, None]
        return {name: jnp.sum(value[:, None] * source, axis=0) for name, value in values.items()}

    return Evaluation(len(split), read, score_batch, lambda sums: name_metrics(sums, sources), copies)


def name_metrics(sums: Mapping[str, np.ndarray], sources: list[str]) -> dict[str, float]:
    """`exact_accuracy` over everything, `exact_accuracy/NAME` for each of several sources."""
    names = (*ACCURACIES, "steps", "cost")
    count = sums["count"]
    metrics = {name: float(sums[name].sum() / count.sum()) for name in names} | {"count": float(count.sum())}
    present = [i for i in range(len(sources)) if count[i]]
    if len(present) > 1:
        for i in present:
            metrics |= {f"{name}/{sources[i]}": float(sums[name][i] / count[i]) for name in names}
            metrics[f"count/{sources[i]}"] = float(count[i])
    return metrics
