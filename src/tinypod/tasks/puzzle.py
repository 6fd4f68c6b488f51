"""Puzzles solved by recursion with adaptive computation: each row of a batch stays until the model says that it has
finished, or its steps are used up; only then does the row take the next example.

A carry is a dict: `z`, `steps` [B], `halted` [B], and the row's `example` (`inputs` and `labels` [B, S], `identifiers`
[B]). Labels of IGNORED_LABEL are not scored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field, NonNegativeFloat, PositiveInt

from tinypod.config import Config
from tinypod.data.views import IGNORED_LABEL, Source, draw_examples
from tinypod.models import trm
from tinypod.sharding import Gather
from tinypod.tasks.task import Task

TABLE = "puzzle_table"


class Stablemax(Config):
    """Cross-entropy over s(x) = x + 1 above zero, 1 / (1 - x) below."""

    kind: Literal["stablemax"] = "stablemax"


class Softmax(Config):
    kind: Literal["softmax"] = "softmax"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Halting(Config):
    max_steps: PositiveInt = 16
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.1  # share of rows made to think on for a random while


class PuzzleTaskConfig(Config):
    kind: Literal["puzzle"] = "puzzle"
    loss: Annotated[Stablemax | Softmax, Field(discriminator="kind")] = Stablemax()
    q_loss_weight: NonNegativeFloat = 0.5
    halting: Halting = Halting()


def build_task(
    config: PuzzleTaskConfig,
    model: trm.TrmConfig,
    shape: trm.PuzzleShape,
    batch_size: int,
    source: Source,
    gather: Gather | None = None,
) -> Task:
    has_table = isinstance(model.puzzle_embedding, trm.PuzzleTable)
    halting = config.halting

    def init_carry(params: trm.Params) -> dict[str, Any]:
        return fresh_carry(model, params, batch_size, shape.seq_len)

    def draw(arrays: dict[str, Array], key: Array) -> dict[str, Any]:
        example_key, explore_key, until_key = jax.random.split(key, 3)
        explore = jax.random.bernoulli(explore_key, halting.exploration, (batch_size,))
        until = jax.random.randint(until_key, (batch_size,), min(2, halting.max_steps), halting.max_steps + 1)
        return {
            "example": draw_examples(source, arrays, example_key, batch_size),
            "min_steps": jnp.where(explore, until, 0),
        }

    def begin(params: trm.Params, carry: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        return take_examples(model, params, carry, batch["example"])

    def loss(
        params: trm.Params, rows: dict[str, Array], carry: dict[str, Any], batch: dict[str, Any]
    ) -> tuple[Array, tuple[dict[str, Any], dict[str, Array]]]:
        z, logits, q = trm.apply(model, params, carry["z"], carry["example"]["inputs"], rows.get(TABLE), gather)
        scores = score(logits, q[:, 0], carry["example"]["labels"])
        lm_loss = _cell_losses(config, logits, carry["example"]["labels"])
        q_loss = _binary_cross_entropy(q[:, 0], scores["exact_accuracy"])
        total = jnp.sum(lm_loss) + config.q_loss_weight * jnp.sum(q_loss)

        steps = carry["steps"] + 1
        halted = (steps >= halting.max_steps) | ((q[:, 0] > 0) & (steps >= batch["min_steps"]))
        finished = (halted & (scores["labelled"] > 0)).astype(jnp.float32)
        sums = {name: jnp.sum(scores[name] * finished) for name in METRICS} | {
            "loss": total,
            "lm_loss": jnp.sum(lm_loss),
            "q_loss": jnp.sum(q_loss),
            "rows": jnp.float32(steps.shape[0]),
            "finished": jnp.sum(finished),
            "steps": jnp.sum(steps.astype(jnp.float32) * finished),
        }
        return total, ({"z": z, "steps": steps, "halted": halted, "example": carry["example"]}, sums)

    return Task(
        init_params=lambda key: trm.init(model, shape, key),
        init_carry=init_carry,
        draw=draw,
        begin=begin,
        lookup=lambda carry: {TABLE: carry["example"]["identifiers"]} if has_table else {},
        loss=loss,
        summarise=summarise,
        frozen=("z_init",),
        tables=(TABLE,) if has_table else (),
    )


def fresh_carry(model: trm.TrmConfig, params: trm.Params, batch_size: int, seq_len: int) -> dict[str, Any]:
    """A carry in which every row has halted, so that all take an example at the first step."""
    blank = jnp.zeros((batch_size, seq_len), jnp.int32)
    zeros = jnp.zeros((batch_size,), jnp.int32)
    return {
        "z": trm.initial_z(model, params, batch_size, seq_len),
        "steps": zeros,
        "halted": jnp.ones((batch_size,), bool),
        "example": {"inputs": blank, "labels": blank, "identifiers": zeros},
    }


def take_examples(
    model: trm.TrmConfig, params: trm.Params, carry: dict[str, Any], example: dict[str, Array]
) -> dict[str, Any]:
    """Rows that halted take the new example and start afresh; the others keep theirs."""
    halted = carry["halted"]

    def select(new: Array, old: Array) -> Array:
        return jnp.where(halted.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    start = trm.initial_z(model, params, *example["inputs"].shape)
    return {
        "z": jax.tree.map(select, start, carry["z"]),
        "steps": jnp.where(halted, 0, carry["steps"]),
        "halted": jnp.zeros_like(halted),
        "example": jax.tree.map(select, example, carry["example"]),
    }


METRICS = ("cell_accuracy", "exact_accuracy", "halt_accuracy")


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


def summarise(sums: Mapping[str, float]) -> dict[str, float]:
    """Losses are means over all rows; scores are means over the rows that finished, if any did."""
    metrics = {name: sums[name] / sums["rows"] for name in ("loss", "lm_loss", "q_loss")}
    if sums["finished"]:
        metrics |= {name: sums[name] / sums["finished"] for name in (*METRICS, "steps")}
    return metrics


def _cell_losses(config: PuzzleTaskConfig, logits_BSV: Array, labels_BS: Array) -> Array:
    """Per row: mean cross-entropy over its labelled cells, in float32."""
    x = logits_BSV.astype(jnp.float32)
    labelled = labels_BS != IGNORED_LABEL
    target = jax.nn.one_hot(jnp.where(labelled, labels_BS, 0), x.shape[-1], dtype=jnp.float32)
    if isinstance(config.loss, Stablemax):
        log_s = jnp.sign(x) * jnp.log1p(jnp.abs(x))  # log of x + 1, or of 1 / (1 - x)
        log_p = log_s - jax.nn.logsumexp(log_s, axis=-1, keepdims=True)
    else:
        log_p = jax.nn.log_softmax(x, axis=-1)
        smoothing = config.loss.label_smoothing
        target = target * (1 - smoothing) + smoothing / x.shape[-1]
    cells = -jnp.sum(target * log_p, axis=-1) * labelled.astype(jnp.float32)
    return jnp.sum(cells, axis=-1) / jnp.maximum(jnp.sum(labelled, axis=-1), 1).astype(jnp.float32)


def _binary_cross_entropy(logit: Array, target: Array) -> Array:
    return jnp.maximum(logit, 0) - logit * target + jnp.log1p(jnp.exp(-jnp.abs(logit)))
