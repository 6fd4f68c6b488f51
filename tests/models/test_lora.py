"""Adapters: their gradients are those of the merged model, whatever the base is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod.models import lora, qwen3
from tinypod.models.qwen3 import LINEARS, Qwen3Config


def make(**changes: Any) -> tuple[Qwen3Config, Any]:
    shape = dict(vocab_size=50, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_size=24)
    options = {"lora": {"rank": 3, "alpha": 6.0, "targets": ["q", "k", "v", "o", "gate", "up", "down"]}}
    config = Qwen3Config.model_validate(shape | {"dtype": "float32"} | options | changes)
    params = qwen3.init(config, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 7))
    for name, (group, *_) in LINEARS.items():  # a new B is zero, and hides what is wrong with A's gradient
        leaf = params["layers"][group][name]
        leaf["lora_B"] = 0.1 * jax.random.normal(next(keys), leaf["lora_B"].shape)
    return config, params


def merged(config: Qwen3Config, params: Any) -> Any:
    """The same model with plain weights."""
    assert config.lora is not None

    def merge(name: str, leaf: Any) -> Any:
        base = jax.vmap(lambda one: qwen3.weight_of(config, name, one))(
            {key: x for key, x in leaf.items() if not key.startswith("lora")}
        )
        return {"weight": base + jax.vmap(lambda one: lora.delta(one, config.lora.scale))(leaf)}

    groups = {
        group: {name: merge(name, leaf) if name in LINEARS else leaf for name, leaf in params["layers"][group].items()}
        for group in ("attention", "mlp")
    }
    return params | {"layers": params["layers"] | groups}


def loss(config: Qwen3Config, params: Any) -> Any:
    tokens = jnp.arange(22).reshape(2, 11) % config.vocab_size
    params = qwen3.prepare(config, params)
    logits = qwen3.head(config, params)(qwen3.apply(config, params, tokens))
    return jnp.mean(jax.nn.log_softmax(logits)[:, :, 7] ** 2)


@pytest.mark.parametrize("base", [None, pytest.param("q4a4", marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_merged_model(base: str | None) -> None:
    config, params = make(low_bit=base)
    plain = config.model_copy(update={"lora": None, "low_bit": None})
    adapters = {
        name: {part: params["layers"][group][name][part] for part in ("lora_A", "lora_B")}
        for name, (group, *_) in LINEARS.items()
    }

    def with_adapters(adapters: Any) -> Any:
        groups = {
            group: params["layers"][group]
            | {name: params["layers"][group][name] | adapters[name] for name in LINEARS if LINEARS[name][0] == group}
            for group in ("attention", "mlp")
        }
        return params | {"layers": params["layers"] | groups}

    ours = jax.grad(lambda x: loss(config, with_adapters(x)))(adapters)
    expected = jax.grad(lambda x: loss(plain, merged(config, with_adapters(x))))(adapters)
    for name, parts in expected.items():
        for part, value in parts.items():
            assert float(jnp.abs(value).max()) > 0, (name, part)
            np.testing.assert_allclose(ours[name][part], value, rtol=2e-3, atol=2e-7, err_msg=f"{name} {part}")


def test_a_new_adapter_changes_nothing_and_counts_as_the_guide_says() -> None:
    config, params = make()
    zero = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if "lora_B" in jax.tree_util.keystr(path) else x, params
    )
    without = config.model_copy(update={"lora": None})
    np.testing.assert_allclose(float(loss(config, zero)), float(loss(without, merged(config, zero))), rtol=1e-6)
    sizes = dict(vocab_size=151936, hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128)
    usual = Qwen3Config.model_validate(sizes | {"mlp_size": 3072, "lora": {"rank": 8}})
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: qwen3.init(usual, jax.random.key(0))))
    assert sum(x.size for path, x in shapes if "lora" in jax.tree_util.keystr(path)) == 4_587_520
