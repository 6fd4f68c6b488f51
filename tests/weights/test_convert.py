"""Weights from one form into another: what is kept to the bit, and what is merely near."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from tinypod.models import low_bit, qwen3
from tinypod.models.qwen3 import LINEARS, Qwen3Config
from tinypod.weights.convert import convert

SHAPE = dict(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=24)
LOW = {"mlp_bits": 2, "mlp_rank": 3, "attention_bits": 4, "attention_rank": 2, "group_size": 8, "fit_rounds": 0}


def config_of(**form: Any) -> Qwen3Config:
    return Qwen3Config.model_validate(SHAPE | {"dtype": "float32"} | form)


def leaf_of(params: Any, name: str) -> dict[str, Any]:
    return params["layers"][LINEARS[name][0]][name]


def effective(config: Qwen3Config, params: Any) -> dict[str, Any]:
    return jax.jit(
        lambda: {
            name: jax.lax.map(lambda one, name=name: qwen3.weight_of(config, name, one), leaf_of(params, name))
            for name in LINEARS
        }
    )()


@pytest.fixture(scope="module")
def plain() -> tuple[Qwen3Config, Any]:
    config = config_of()
    return config, jax.jit(lambda: qwen3.init(config, jax.random.key(3)))()


@pytest.mark.slow
def test_a_straight_through_weight_begins_as_the_source_and_freezes_to_the_bit(plain: tuple[Qwen3Config, Any]) -> None:
    trained, frozen = config_of(low_bit=LOW, straight_through=True), config_of(low_bit=LOW)
    made = convert(*plain, trained)
    quantised = convert(*plain, frozen)
    assert made.errors == pytest.approx(quantised.errors, rel=1e-5)
    for name in LINEARS:
        leaf = leaf_of(made.params, name)
        assert sorted(leaf) == ["A", "B", "g", "latent"]
        np.testing.assert_array_equal(leaf["latent"], leaf_of(plain[1], name)["weight"])
    # As if trained: the indices are no longer those of the source.
    moved = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape) if "latent" in str(path) else x,
        made.params,
    )
    untrained, before = effective(trained, made.params), effective(trained, moved)
    kept = convert(trained, moved, frozen)
    assert sorted(leaf_of(kept.params, "q")) == ["A", "B", "g", "index"]
    assert set(kept.errors.values()) == {0.0}
    after, again = effective(frozen, kept.params), effective(trained, convert(frozen, kept.params, trained).params)
    for name, weight in before.items():
        assert not np.array_equal(weight, untrained[name])
        np.testing.assert_array_equal(after[name], weight)
        np.testing.assert_array_equal(again[name], weight)


def test_a_straight_through_model_takes_other_bits(plain: tuple[Qwen3Config, Any]) -> None:
    trained, other = config_of(low_bit=LOW, straight_through=True), config_of(low_bit=LOW | {"mlp_bits": 4})
    made = convert(*plain, trained).params
    errors = convert(trained, made, other).errors
    assert errors["up"] > 0
    assert errors["q"] == 0.0


def test_shapes_and_rules_of_a_straight_through_model_fit() -> None:
    config = config_of(low_bit="q2a2", straight_through=True)
    params = jax.jit(lambda: qwen3.init(config, jax.random.key(0)))()
    leaf = {name: x[0] for name, x in leaf_of(params, "up").items()}
    np.testing.assert_allclose(low_bit.effective(leaf, 2), leaf["latent"], rtol=1e-6)
    paths = [pattern for pattern, _ in qwen3.sharding_rules(config)]
    assert r"layers\.mlp\.up\.latent" in paths
    assert r"layers\.mlp\.up\.index" not in paths


@pytest.mark.parametrize("form", [{}, {"low_bit": "q2a2", "lora": {"rank": 2}}])
def test_straight_through_needs_low_bits_and_no_adapters(form: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="straight_through=true"):
        config_of(straight_through=True, **form)
