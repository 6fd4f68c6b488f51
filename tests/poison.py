"""Batches whose loss is NaN, for real: inside the compiled step, chosen by their numbers."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from tinypod import tasks
from tinypod.tasks.task import Task, TaskKind


def poisoned(kind: TaskKind, numbers: Collection[int]) -> TaskKind:
    """The kind, with tasks whose batches of these numbers hold a NaN."""

    def build(*args: Any) -> Task:
        task = kind.build(*args)

        def draw(feed: Any, draw: Any, varied: Any) -> Any:
            batch = task.draw(feed, draw, varied)
            bad = jnp.isin(draw.number, jnp.asarray(sorted(numbers), jnp.int32))
            return batch | {"poison": jnp.where(bad, jnp.nan, jnp.zeros(batch["min_steps"].shape))}

        def loss(params: Any, rows: Any, carry: Any, batch: Any, varied: Any) -> Any:
            total, (carry, sums) = task.loss(params, rows, carry, batch, varied)
            total = total + jnp.sum(batch["poison"])
            return total, (carry, sums | {"loss": total})

        return dataclasses.replace(task, draw=draw, loss=loss)

    return kind._replace(build=build)


def poison(numbers: Collection[int]) -> None:
    """From now on, in this process."""
    tasks.KINDS["puzzle"] = poisoned(tasks.KINDS["puzzle"], numbers)
