import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod.generate.sampling import Sampling, choose

LOGITS = jnp.log(jnp.asarray([[0.1, 0.4, 0.05, 0.25, 0.2]], jnp.float32))


def drawn(sampling: Sampling, count: int = 4000) -> np.ndarray:
    """How often each token is drawn."""
    keys = jax.random.split(jax.random.key(0), count)
    tokens = choose(jnp.repeat(LOGITS, count, axis=0), keys, sampling)
    return np.bincount(np.asarray(tokens), minlength=5) / count


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(0.0), [0, 1, 0, 0, 0]),
        (Sampling(1.0), [0.1, 0.4, 0.05, 0.25, 0.2]),
        (Sampling(1.0, top_k=1), [0, 1, 0, 0, 0]),
        (Sampling(1.0, top_k=2), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        (Sampling(1.0, top_k=99), [0.1, 0.4, 0.05, 0.25, 0.2]),
        (Sampling(1.0, top_p=0.0), [0, 1, 0, 0, 0]),
        (Sampling(1.0, top_p=0.7), [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),  # 0.65 are too few
        (Sampling(1.0, top_k=2, top_p=0.6), [0, 1, 0, 0, 0]),  # 0.4 of 0.65 are enough
        (Sampling(0.5), np.array([0.01, 0.16, 0.0025, 0.0625, 0.04]) / 0.275),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(sampling: Sampling, expected: list[float]) -> None:
    found = drawn(sampling)
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert not found[np.asarray(expected) == 0].any()
