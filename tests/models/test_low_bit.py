"""Low-bit weights against their definition, and how near they come to the weights they stand for."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod.models import low_bit, qwen3
from tinypod.models.qwen3 import Qwen3Config

RNG = np.random.default_rng(0)


def random_leaf(inputs: tuple[int, ...], outputs: tuple[int, ...], bits: int, rank: int) -> dict[str, Any]:
    leaf = low_bit.init(jax.random.key(1), 1, inputs, outputs, bits, rank)
    return {name: x[0] for name, x in leaf.items()}


def heavy_tailed(inputs: int, outputs: int) -> jax.Array:
    """Rows and columns of different sizes, as trained weights have them."""
    w = RNG.standard_normal((inputs, outputs)) * np.exp(0.5 * RNG.standard_normal((1, outputs)))
    return jnp.asarray(w * np.exp(0.5 * RNG.standard_normal((inputs, 1))) / inputs**0.5, jnp.float32)


@pytest.mark.parametrize(("bits", "rank"), [(2, 3), (4, 5)])
def test_the_product_is_that_of_the_formula_rank_by_rank(bits: int, rank: int) -> None:
    leaf = random_leaf((12,), (10,), bits, rank)
    x = RNG.standard_normal((4, 12))
    index, a, b, g = (np.asarray(leaf[name], np.float64) for name in ("index", "A", "B", "g"))
    q = np.linspace(-1, 1, 2**bits)[index.astype(int)].T  # [out, in]
    expected = np.zeros((4, 10))
    for k in range(rank):
        a_k, b_k = a[:, k] / np.linalg.norm(a[:, k]), b[k] / np.linalg.norm(b[k])
        expected += g[k] * a_k * (x * b_k @ q.T)
    ours = jnp.asarray(x, jnp.float32) @ low_bit.effective(leaf, bits)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_levels_have_no_zero_and_are_looked_up_by_arithmetic() -> None:
    for bits in (2, 4):
        np.testing.assert_allclose(
            low_bit.look_up(jnp.arange(2**bits, dtype=jnp.uint8), bits), low_bit.levels(bits), atol=1e-7
        )
        assert not (np.asarray(low_bit.levels(bits)) == 0).any()


def test_indices_are_the_nearest_there_are() -> None:
    leaf, w = random_leaf((16,), (8,), 2, 4), heavy_tailed(16, 8)
    s = np.asarray(low_bit.scales(leaf))
    chosen = low_bit.tighten(leaf, w, 2)
    errors = np.abs(np.asarray(low_bit.levels(2))[:, None, None] * s - np.asarray(w))
    np.testing.assert_allclose(np.abs(low_bit.effective(chosen, 2) - w), errors.min(axis=0), atol=1e-6)


@pytest.mark.parametrize(("bits", "limit"), [(2, 0.40), (4, 0.11)])
def test_fitting_makes_the_error_smaller(bits: int, limit: float) -> None:
    w = heavy_tailed(128, 96)
    options = dict(inputs=1, bits=bits, rank=8, group_size=32)
    errors = [
        float(low_bit.relative_error(w, low_bit.quantise(w, **options, rounds=rounds), bits)) for rounds in (0, 1, 4)
    ]
    assert all(after < before for before, after in itertools.pairwise(errors))
    assert errors[-1] < limit


def test_a_weight_with_heads_is_quantised_as_its_matrix_is() -> None:
    w = heavy_tailed(24, 32)
    options = dict(bits=4, rank=4, group_size=8, rounds=1)
    flat = low_bit.effective(low_bit.quantise(w, inputs=1, **options), 4)
    heads = low_bit.effective(low_bit.quantise(w.reshape(24, 4, 8), inputs=1, **options), 4)
    np.testing.assert_allclose(heads.reshape(24, 32), flat, atol=1e-5)
    into = low_bit.effective(low_bit.quantise(w.reshape(3, 8, 32), inputs=2, **options), 4)
    np.testing.assert_allclose(into.reshape(24, 32), flat, atol=1e-5)


def test_ranks_beyond_the_groups_do_no_harm() -> None:
    w = heavy_tailed(64, 48)
    options = dict(inputs=1, bits=4, group_size=32, rounds=0)
    few, many = (low_bit.relative_error(w, low_bit.quantise(w, rank=rank, **options), 4) for rank in (2, 16))
    assert many <= few * 1.001


def test_straight_through_gradients_reach_the_latent_weight() -> None:
    w = heavy_tailed(16, 8)
    leaf = low_bit.quantise(w, inputs=1, bits=2, rank=4, group_size=8)
    trained = low_bit.straight_through(leaf, w)
    np.testing.assert_array_equal(low_bit.effective(trained, 2), low_bit.effective(leaf, 2))  # to the bit
    weights = jnp.asarray(RNG.standard_normal((16, 8)), jnp.float32)

    def loss(leaf: dict[str, Any]) -> Any:
        return jnp.sum(weights * low_bit.effective(leaf, 2))

    found = jax.grad(loss)(trained)
    np.testing.assert_array_equal(found["latent"], weights)
    frozen = jax.grad(loss, allow_int=True)(leaf)
    for name in ("A", "B", "g"):  # the scales learn as they do under frozen indices
        np.testing.assert_allclose(found[name], frozen[name], rtol=1e-6, atol=1e-7)


def test_presets_have_the_sizes_that_the_guide_gives() -> None:
    """Scale parameters and bits a weight of Qwen3-0.6B."""
    expected = {
        "q4_r32": (20_191_360, 4.73),
        "q4a4": (2_523_920, 4.09),
        "q2a4": (13_307_392, 3.28),
        "q2a2": (20_191_360, 2.73),
    }
    shape = dict(vocab_size=151936, hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128)
    for preset, (count, bits) in expected.items():
        config = Qwen3Config.model_validate(shape | {"mlp_size": 3072, "low_bit": preset})
        params = jax.eval_shape(lambda config=config: qwen3.init(config, jax.random.key(0)))
        leaves = [leaf for group in ("attention", "mlp") for leaf in params["layers"][group].values()]
        leaves = [leaf for leaf in leaves if low_bit.is_low_bit(leaf)]
        assert sum(leaf[part].size for leaf in leaves for part in ("A", "B", "g")) == count
        assert round(qwen3.bits_per_weight(config), 2) == bits
