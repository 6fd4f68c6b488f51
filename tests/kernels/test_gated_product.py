"""The gated product of Hopper GPUs against the plain formula, in Mosaic GPU's interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # jax 0.10 has no public name for it

from tinypod import sharding
from tinypod.kernels import gated_product
from tinypod.sharding import MeshConfig


def make(batch: int = 2, length: int = 64, width: int = 128, inner: int = 256) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    gate_up = jax.random.normal(keys[0], (width, 2, inner)) / width**0.5
    return gate_up, jax.random.normal(keys[1], (batch, length, width), jnp.bfloat16)


def test_the_kernel_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer processors than tiles, and not a multiple: some take one more than others."""
    monkeypatch.setattr(gated_product, "PROCESSORS", 3)
    gate_up, x = make(batch=4)
    exact = gated_product.plain(gate_up.astype(jnp.bfloat16).astype(jnp.float32), x.astype(jnp.float32))
    found = gated_product.multiply(gate_up, x.reshape(-1, x.shape[2]), interpret=InterpretGPUParams())
    plain = gated_product.plain(gate_up, x)

    def error(y: jax.Array) -> float:
        return float(jnp.linalg.norm(y.astype(jnp.float32).reshape(exact.shape) - exact) / jnp.linalg.norm(exact))

    assert error(found) < 1.2 * error(plain) < 0.01


def multiplies(function: Any, *given: Any) -> bool:
    """Whether the kernel is in a program: the instruction that it multiplies with."""
    return "wgmma" in str(jax.make_jaxpr(lambda *given: function(*given))(*given))  # anew: traces are kept


def test_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where gradients are wanted, nor for packed runs, nor for rows that do not fill its tiles."""
    placement = sharding.place(sharding.make_mesh(MeshConfig(devices=1)), {})
    gate_up, x = make()

    def product(gate_up: jax.Array, x: jax.Array) -> jax.Array:
        inner = gated_product.fused(gate_up, x, placement)
        return gated_product.plain(gate_up, x) if inner is None else inner

    assert not multiplies(product, gate_up, x)  # this is a CPU
    monkeypatch.setattr(sharding.Placement, "kernels", "hopper")
    assert multiplies(product, gate_up, x)
    assert not multiplies(product, gate_up, x[:, :63])
    assert not multiplies(product, gate_up, x.astype(jnp.float16))
    assert not multiplies(product, gate_up[:, :, :200], x)
    assert not multiplies(lambda gate_up, x: product(gate_up[:96], x[:, :, :96]), gate_up, x)

    def loss(gate_up: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(product(gate_up, x).astype(jnp.float32))

    expected = jax.grad(lambda *given: jnp.sum(gated_product.plain(*given).astype(jnp.float32)), argnums=(0, 1))
    for ours, theirs in zip(jax.grad(loss, argnums=(0, 1))(gate_up, x), expected(gate_up, x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    stopped = jax.lax.stop_gradient
    assert multiplies(jax.grad(lambda scale: scale * loss(stopped(gate_up), stopped(x))), 1.0)

    packed = jax.vmap(product, in_axes=(0, None))(jnp.stack([gate_up, 2 * gate_up]), x)
    np.testing.assert_array_equal(packed[1], gated_product.plain(2 * gate_up, x))


@pytest.mark.parametrize("mesh", [MeshConfig(devices=1), MeshConfig(data=2, fsdp=4)])
def test_it_lowers_for_a_gpu(mesh: MeshConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding.Placement, "kernels", "hopper")
    placement = sharding.place(sharding.make_mesh(mesh), {})
    gate_up, x = make(batch=16, width=512, inner=1536)
    lowered = jax.jit(lambda *given: gated_product.fused(*given, placement)).trace(gate_up, x)
    assert "mosaic_gpu" in lowered.lower(lowering_platforms=("cuda",)).as_text()
