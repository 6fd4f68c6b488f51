"""The next token from logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Sampling(NamedTuple):
    temperature: float = 0.0  # 0: the likeliest token
    top_k: int | None = None  # only the so many likeliest
    top_p: float | None = None  # only the likeliest that together have this probability


GREEDY = Sampling()


def choose(logits_BV: Array, keys_B: Array, sampling: Sampling) -> Array:
    """A token for each row, int32 [B]; temperature first, then top-k, then top-p."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None:
        least_B1 = jax.lax.top_k(logits_BV, min(sampling.top_k, logits_BV.shape[-1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    if sampling.top_p is not None:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        chances_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(chances_BV, axis=-1) - chances_BV  # of the likelier ones; the first is always kept
        least_B1 = jnp.min(jnp.where(before_BV < max(sampling.top_p, 1e-9), sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
