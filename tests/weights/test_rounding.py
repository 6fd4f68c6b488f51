"""Groups rounded by qwix against the definition, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod.errors import ConfigError
from tinypod.weights.rounding import Kind, Rounding, round_weight

# The 16 levels that the QLoRA paper gives (arXiv 2305.14314, appendix E).
NEGATIVE = [-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004]
POSITIVE = [0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0]
NF4 = np.array([*NEGATIVE, 0.0, *POSITIVE])


def by_hand(w: np.ndarray, kind: Kind, size: int) -> np.ndarray:
    """w [in, out]."""
    groups = w.reshape(-1, size, w.shape[1])
    largest = np.abs(groups).max(axis=1, keepdims=True)
    if kind == "nf4":
        chosen = NF4[np.abs((groups / largest)[..., None] - NF4).argmin(axis=-1)]
        scale = largest
    else:  # integers from -2^(b-1) to 2^(b-1) - 1; the largest weight lies at the edge of the last one's bin
        half = {"int4": 8, "int2": 2}[kind]
        scale = largest / (half - 0.5)
        chosen = np.clip(np.round(groups / scale), -half, half - 1)
    return (chosen * scale.astype(np.float16).astype(np.float64)).reshape(w.shape)


@pytest.mark.parametrize(("kind", "limit"), [("int4", 0.11), ("nf4", 0.10), ("int2", 0.60)])
def test_groups_are_rounded_as_defined(kind: Kind, limit: float) -> None:
    w = np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32)
    expected = by_hand(w.astype(np.float64), kind, 16)
    rounded = np.asarray(jax.jit(lambda w: round_weight(w, 1, Rounding(kind, 16)))(jnp.asarray(w)))
    groups = np.abs(w).reshape(4, 16, 12)
    at_edge = (groups == groups.max(axis=1, keepdims=True)).reshape(
        w.shape
    )  # of an integer's bin: either side is right
    np.testing.assert_allclose(rounded[~at_edge], expected[~at_edge], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.abs(rounded - w)[at_edge], np.abs(expected - w)[at_edge], rtol=1e-2, atol=1e-3)
    assert 0 < np.linalg.norm(rounded - w) / np.linalg.norm(w) < limit
    # Heads as dimensions of their own, among the outputs or the inputs, change nothing.
    for shape, inputs in (((64, 3, 4), 1), ((8, 8, 12), 2)):
        again = jax.jit(round_weight, static_argnums=(1, 2))(jnp.asarray(w.reshape(shape)), inputs, Rounding(kind, 16))
        np.testing.assert_array_equal(again.reshape(64, 12), rounded)


def test_bits_count_a_scale_for_each_group() -> None:
    assert [Rounding(kind, size).bits_per_weight for kind, size in (("int4", 32), ("nf4", 64), ("int2", 16))] == [
        4.5,
        4.25,
        3.0,
    ]


def test_groups_must_divide_the_inputs() -> None:
    with pytest.raises(ConfigError, match="--group-size 48 does not divide the 64 inputs"):
        round_weight(jnp.ones((64, 4)), 1, Rounding("int4", 48))
