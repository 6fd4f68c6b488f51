"""The channel MLP of Hopper GPUs against the plain formula, in Mosaic GPU's interpreter."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # jax 0.10 has no public name for it

from tinypod import sharding
from tinypod.kernels import gated_product
from tinypod.sharding import MeshConfig


def make(batch: int = 2, length: int = 64, width: int = 128, inner: int = 256) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    gate_up = jax.random.normal(keys[0], (width, 2, inner)) / width**0.5
    down = jax.random.normal(keys[1], (inner, width)) / inner**0.5
    return gate_up, down, jax.random.normal(keys[2], (batch, length, width), jnp.bfloat16)


def exactly(*arrays: jax.Array) -> list[jax.Array]:
    """What the kernels are given, in float32."""
    return [array.astype(jnp.bfloat16).astype(jnp.float32) for array in arrays]


def error(found: jax.Array, exact: jax.Array) -> float:
    return float(jnp.linalg.norm(found.astype(jnp.float32).reshape(exact.shape) - exact) / jnp.linalg.norm(exact))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer processors than tiles, and not a multiple: some take one more than others."""
    monkeypatch.setattr(sharding.Placement, "kernels", "hopper")
    monkeypatch.setattr(gated_product, "PROCESSORS", 3)
    for name in ("gated", "gated_gradient"):
        kernel = getattr(gated_product, name)
        monkeypatch.setattr(gated_product, name, partial(kernel, interpret=InterpretGPUParams()))
    jax.clear_caches()


@pytest.mark.slow
def test_the_kernels_are_the_formulas(interpreted: None) -> None:
    gate_up, down, x = make(batch=4)
    x = x.reshape(-1, x.shape[2])
    inner, gates_and_ups = gated_product._gated(*exactly(gate_up, x))
    plain = gated_product._gated(gate_up, x)
    assert error(gated_product.gated(gate_up, x), inner) < 1.2 * error(plain[0], inner) < 0.01
    found = gated_product.gated(gate_up, x, keep=True)
    np.testing.assert_array_equal(found[0], gated_product.gated(gate_up, x))
    assert error(found[1], gates_and_ups) < 1.2 * error(plain[1], gates_and_ups) < 0.01

    dy = jax.random.normal(jax.random.key(1), x.shape, jnp.bfloat16)
    exact = gated_product._gated_gradient(*exactly(down, dy, found[1]))
    expected = gated_product._gated_gradient(down, dy, found[1])
    assert error(gated_product.gated_gradient(down, dy, found[1]), exact) < 1.2 * error(expected, exact) < 0.01


@pytest.mark.slow
def test_the_kernels_of_a_normalised_gate_are_the_formulas(interpreted: None) -> None:
    """Besides what they compute for SwiGLU, a row's sums of squares, and what the row's scale adds to its gradient."""
    gate_up, down, x = make(batch=4)
    x = x.reshape(-1, x.shape[2])
    gate, up = (exactly(x)[0] @ exactly(gate_up)[0][:, i] for i in range(2))
    inner, squares = gated_product.gated(gate_up, x, squares=True)
    np.testing.assert_array_equal(inner, gated_product.gated(gate_up, x))
    by_tile = jnp.square(gate * up).reshape(-1, 2, 128).sum(axis=2).T
    np.testing.assert_allclose(squares, by_tile, rtol=1e-4)
    again, squares_again, gates_and_ups = gated_product.gated(gate_up, x, keep=True, squares=True)
    np.testing.assert_array_equal(inner, again)
    np.testing.assert_array_equal(squares, squares_again)
    np.testing.assert_array_equal(gates_and_ups, gated_product.gated(gate_up, x, keep=True)[1])

    dy = jax.random.normal(jax.random.key(1), x.shape, jnp.bfloat16)
    along = jax.random.normal(jax.random.key(2), x.shape[:1])
    gate, up, dy32, down32 = exactly(gates_and_ups[:, 0], gates_and_ups[:, 1], dy, down)
    parts = gate * up * along[:, None]
    exact = gated_product._gated_gradient(down32, dy32, gates_and_ups.astype(jnp.float32))
    exact += jnp.stack([parts * up, parts * gate], axis=1)
    assert error(gated_product.gated_gradient(down, dy, gates_and_ups, along), exact) < 0.004


GATES = pytest.mark.parametrize("epsilon", [None, 1e-5], ids=["swiglu", "normalised"])


def mlp(
    placement: sharding.Placement, gate_up: jax.Array, down: jax.Array, x: jax.Array, epsilon: float | None = None
) -> jax.Array:
    y = gated_product.fused(gate_up, down, x, placement, epsilon)
    return gated_product.plain(gate_up, down, x, epsilon) if y is None else y


def gradients(function: Any, *given: jax.Array) -> tuple[jax.Array, ...]:
    weights = jax.random.normal(jax.random.key(2), given[2].shape)

    def loss(*given: jax.Array) -> jax.Array:
        return jnp.sum(function(*given).astype(jnp.float32) * weights)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*given)


@pytest.mark.slow
@GATES
@pytest.mark.parametrize(
    ("rows", "devices"),
    [((4, 64), 1), ((3, 50), 1), ((4, 50), 2), ((3, 50), 2)],
)
def test_the_mlp_and_its_gradients_are_the_plain_ones(
    rows: tuple[int, int], devices: int, epsilon: float | None, interpreted: None
) -> None:
    """Those of rows that do not fill the tiles, too. Each of two devices has half of the rows, or all of them; the
    kernels themselves are interpreted on one alone, as the interpreter's threads may wait for each other's for ever."""
    placement = sharding.place(sharding.make_mesh(MeshConfig(devices=devices)), {})
    gate_up, down, x = make(*rows)
    given = gate_up, down.astype(jnp.bfloat16), x  # as with `fsdp`, and as without
    formula = partial(gated_product.plain, gate_epsilon=epsilon)
    exact = formula(*exactly(*given))
    assert error(mlp(placement, *given, epsilon), exact) < 1.2 * error(formula(*given), exact) < 0.02
    ours, plain = gradients(partial(mlp, placement, epsilon=epsilon), *given), gradients(formula, *given)
    for found, other, exact in zip(ours, plain, gradients(formula, *exactly(*given)), strict=True):
        assert found.dtype == other.dtype
        assert error(found, exact) < 1.2 * error(other, exact) < 0.02


def multiplies(function: Any, *given: Any) -> int:
    """How many kernels are in a program: by the instruction that they multiply with."""
    return str(jax.make_jaxpr(lambda *given: function(*given))(*given)).count("wgmma_ref")  # anew: traces are kept


@GATES
def test_where_they_are_used(epsilon: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for packed runs, and not for rows that do not fill the tiles."""
    placement = sharding.place(sharding.make_mesh(MeshConfig(devices=1)), {})
    gate_up, down, x = given = make()
    product = partial(mlp, placement, epsilon=epsilon)
    assert not multiplies(product, *given)  # this is a CPU
    monkeypatch.setattr(sharding.Placement, "kernels", "hopper")
    assert multiplies(product, *given)
    assert not multiplies(product, gate_up, down, x[:, :63])
    assert not multiplies(product, gate_up, down, x.astype(jnp.float16))
    assert not multiplies(product, gate_up[:, :, :200], down[:200], x)
    assert not multiplies(product, gate_up[:96], down[:, :96], x[:, :, :96])
    assert multiplies(partial(gradients, product), *given) == 2 * multiplies(product, *given)

    packed = jnp.stack([gate_up, 2 * gate_up]), jnp.stack([down, down])
    in_packs = jax.vmap(product, in_axes=(0, 0, None))
    found, expected = in_packs(*packed, x)[1], gated_product.plain(2 * gate_up, down, x, epsilon)
    if epsilon is None:
        np.testing.assert_array_equal(found, expected)
    assert error(found, expected.astype(jnp.float32)) < 0.01
    assert not multiplies(jax.vmap(partial(gradients, product), in_axes=(0, 0, None)), *packed, x)


@GATES
@pytest.mark.parametrize("mesh", [MeshConfig(devices=1), MeshConfig(data=2, fsdp=4)])
def test_they_lower_for_a_gpu(mesh: MeshConfig, epsilon: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding.Placement, "kernels", "hopper")
    placement = sharding.place(sharding.make_mesh(mesh), {})
    given = make(batch=16, width=512, inner=1536)
    traced = jax.jit(partial(gradients, partial(mlp, placement, epsilon=epsilon))).trace(*given)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("gated_product_gradient") > 0
