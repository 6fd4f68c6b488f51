"""Token by token with kept keys and values, against the whole sequence at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod.models import decoding, qwen3
from tinypod.models.qwen3 import Qwen3Config


def random_model(**changes: Any) -> tuple[Qwen3Config, Any]:
    shape = dict(vocab_size=61, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=40)
    config = Qwen3Config.model_validate(shape | {"dtype": "float32", "tied": False} | changes)

    def init() -> Any:  # random in every leaf, norms and adapters, too
        leaves, tree = jax.tree.flatten(qwen3.init(config, jax.random.key(0)))
        noise = [0.2 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)]
        return tree.unflatten(x if x.dtype == jnp.uint8 else x + n for x, n in zip(leaves, noise, strict=True))

    return config, jax.jit(init)()


@pytest.mark.parametrize("form", [{}, pytest.param({"low_bit": "q2a2", "lora": {"rank": 2}}, marks=pytest.mark.slow)])
def test_logits_are_those_of_a_full_pass_at_every_position(form: dict[str, Any]) -> None:
    config, params = random_model(**form)
    params = qwen3.prepare(config, params)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 13)).astype(np.int32)
    head = qwen3.head(config, params)
    expected = jax.jit(lambda ids: head(qwen3.apply(config, params, ids)))(jnp.asarray(tokens))
    # A prompt of 5 padded to 8 with tokens that must leave no trace, then the others one at a time.
    padded = jnp.asarray(np.concatenate([tokens[:, :5], np.full((2, 3), 7, np.int32)], axis=1))
    extend = jax.jit(lambda cache, ids, start: decoding.extend(config, params, cache, ids, start))
    hidden, cache = extend(decoding.init_cache(config, 2, 16), padded, jnp.int32(0))
    found = [head(hidden[:, :5])]
    for at in range(5, 13):
        hidden, cache = extend(cache, jnp.asarray(tokens[:, at : at + 1]), jnp.int32(at))
        found.append(head(hidden))
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), expected, rtol=1e-4, atol=1e-5)
