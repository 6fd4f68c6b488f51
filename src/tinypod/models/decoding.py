"""Qwen3 a few tokens at a time: the keys and values of earlier positions are kept, and not computed again.

The cache has a fixed length S. A call writes the keys and values of its T tokens at `start`, whatever stood there, and
each token attends to the positions up to its own: what a padded prompt left behind its end is never seen, because the
tokens that follow are written over it first.

Shape letters: those of `qwen3`, and S positions of the cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from tinypod.models import layers, qwen3
from tinypod.models.qwen3 import Params, Qwen3Config
from tinypod.sharding import ANYWHERE, BATCH_AXES, Placement


class KVCache(NamedTuple):
    keys: Array  # [n, B, S, K, H]
    values: Array


CACHE_SPEC = PartitionSpec(None, BATCH_AXES, None, "tensor", None)


def init_cache(config: Qwen3Config, rows: int, length: int) -> KVCache:
    shape = (config.num_layers, rows, length, config.num_kv_heads, config.head_dim)
    return KVCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))


def extend(
    config: Qwen3Config,
    params: Params,
    cache: KVCache,
    tokens_BT: Array,
    start: Array,
    placement: Placement = ANYWHERE,
) -> tuple[Array, KVCache]:
    """The last hidden states [B, T, D] of tokens at positions start, start + 1, ..., as `qwen3.apply` has them; and
    the cache with these tokens in it."""
    num_tokens, length = tokens_BT.shape[1], cache.keys.shape[2]
    rope = layers.rope_tables(length, config.head_dim, config.rope_theta)
    cos_T1H, sin_T1H = (jax.lax.dynamic_slice_in_dim(table, start, num_tokens) for table in rope)
    position_T1 = start + jnp.arange(num_tokens)[:, None]
    seen_TS = jnp.arange(length)[None, :] <= position_T1

    def block(carry: tuple[Array, KVCache], numbered: tuple[Array, Params]) -> tuple[tuple[Array, KVCache], None]:
        (x_BTD, kept), (number, layer) = carry, numbered
        if placement.gather is not None:
            layer = placement.gather("layers", layer)
        q_BTNH, *new = qwen3.before_attention(config, layer, x_BTD, (cos_T1H, sin_T1H))
        kept = KVCache(
            *(
                jax.lax.dynamic_update_slice(old, x[None].astype(old.dtype), (number, 0, start, 0, 0))
                for old, x in zip(kept, new, strict=True)
            )
        )
        k_BSKH, v_BSKH = (jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for x in kept)
        y_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, mask=seen_TS[None, None])
        return (qwen3.after_attention(config, layer, x_BTD, y_BTNH), kept), None

    x_BTD = qwen3.look_up(config, params, tokens_BT, placement)
    numbers = jnp.arange(config.num_layers)
    (x_BTD, cache), _ = jax.lax.scan(block, (x_BTD, cache), (numbers, params["layers"]))
    return layers.scaled_rms_norm(x_BTD, params["norm"], config.norm_eps), cache
