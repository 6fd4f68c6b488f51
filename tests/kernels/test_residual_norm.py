"""The residual's norm and its gradient against autodiff of the formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod import sharding
from tinypod.kernels import residual_norm
from tinypod.models import layers
from tinypod.sharding import ANYWHERE, MeshConfig


def make(*shape: int) -> list[jax.Array]:
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3)]


@pytest.mark.parametrize("shape", [(2, 8, 64), (3, 7, 128)])  # 21 rows fill no blocks
@pytest.mark.parametrize("packed", [False, True])
def test_the_gradient_is_that_of_the_formula(shape: tuple[int, int, int], packed: bool) -> None:
    x, y, d_out = make(*shape)
    kernel = partial(residual_norm.add_and_norm, epsilon=layers.RMS_EPSILON, interpret=True)
    formula = partial(layers.add_and_norm, placement=ANYWHERE)

    def run(function, x: jax.Array, y: jax.Array, d_out: jax.Array) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(function, x, y)
        return out, *pull_back(d_out)

    exact = run(formula, *((x + y).astype(jnp.float32), jnp.zeros(shape)), d_out.astype(jnp.float32))
    given = [jnp.stack([array, array]) for array in (x, y, d_out)] if packed else [x, y, d_out]
    found = (jax.vmap(partial(run, kernel)) if packed else partial(run, kernel))(*given)
    for ours, plain, true in zip(found, run(formula, x, y, d_out), exact, strict=True):
        ours = ours[1] if packed else ours
        errors = [float(jnp.linalg.norm(a.astype(jnp.float32) - true) / jnp.linalg.norm(true)) for a in (ours, plain)]
        assert errors[0] < 1.1 * errors[1] < 0.01


@pytest.mark.parametrize("mesh", [MeshConfig(devices=1), MeshConfig(data=2, fsdp=4)])
def test_it_lowers_for_a_gpu(mesh: MeshConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = sharding.place(sharding.make_mesh(mesh), {})
    x, y, d_out = make(16, 97, 512)

    def backward(x: jax.Array, y: jax.Array, d_out: jax.Array) -> jax.Array:
        return jax.vjp(partial(layers.add_and_norm, placement=placement), x, y)[1](d_out)[0]

    np.testing.assert_array_equal(  # on CPUs, the formula
        backward(x, y, d_out), jax.vjp(lambda x, y: layers.rms_norm(x + y), x, y)[1](d_out)[0]
    )
    monkeypatch.setattr(sharding.Placement, "kernels", "cuda")
    lowered = jax.jit(lambda *given: backward(*given)).trace(x, y, d_out).lower(lowering_platforms=("cuda",))
    assert "residual_norm_backward" in lowered.as_text()
    assert "flops" in lowered.as_text()  # which the planner reads
    odd = [array[..., :500] for array in (x, y, d_out)]
    assert residual_norm.fused(*odd[:2], 1e-5, placement) is None
