"""Batches whose loss is NaN, for real: inside the compiled step, chosen by their numbers."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from tinypod import experiment
from tinypod.tasks.task import Task


def poisoned(build_task: Callable[..., Task], seed: int, numbers: Collection[int]) -> Callable[..., Task]:
    """`build_task`, with tasks whose batches of these numbers hold a NaN."""
    keys = jnp.stack(
        [jax.random.key_data(jax.random.fold_in(jax.random.key(seed), number + 1)) for number in sorted(numbers)]
    )

    def build(*args: Any, **kwargs: Any) -> Task:
        task = build_task(*args, **kwargs)

        def draw(source: Any, key: Any) -> Any:
            batch = task.draw(source, key)
            bad = jnp.any(jnp.all(keys == jax.random.key_data(key)[None], axis=-1))
            return batch | {"poison": jnp.where(bad, jnp.nan, jnp.zeros(batch["min_steps"].shape))}

        def loss(params: Any, rows: Any, carry: Any, batch: Any) -> Any:
            total, (carry, sums) = task.loss(params, rows, carry, batch)
            total = total + jnp.sum(batch["poison"])
            return total, (carry, sums | {"loss": total})

        return dataclasses.replace(task, draw=draw, loss=loss)

    return build


def poison(numbers: Collection[int], seed: int = 0) -> None:
    """From now on, in this process."""
    experiment.build_task = poisoned(experiment.build_task, seed, numbers)
