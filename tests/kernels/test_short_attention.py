"""The kernel in Pallas' interpreter, against the plain formula of `layers.attention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from tinypod import sharding
from tinypod.kernels import short_attention
from tinypod.models import layers
from tinypod.sharding import ANYWHERE, MeshConfig

BATCH, HEADS = 3, 2
# Positions, width of a head, rotary positions or none: TRM's own first.
CASES = [(97, 64, True), (97, 32, False), (1, 64, True), (16, 32, False), (33, 64, False), (128, 32, True)]


def plain(qkv_BT3NH: Array, rope: short_attention.Rope | None) -> Array:
    q, k, v = (qkv_BT3NH[:, :, i] for i in range(3))
    if rope is not None:
        q, k = layers.rotate(q, *rope), layers.rotate(k, *rope)
    return jax.nn.dot_product_attention(q, k, v)


def fused(qkv_BT3NH: Array, rope: short_attention.Rope | None) -> Array:
    return short_attention.attend(qkv_BT3NH, rope, interpret=True)


def values(length: int, head: int) -> tuple[Array, Array]:
    """Scores of a few units, so that the softmax is neither flat nor a choice of one."""
    x, dy = (jax.random.key(seed) for seed in range(2))
    qkv = 1.5 * jax.random.normal(x, (BATCH, length, 3, HEADS, head))
    return qkv, jax.random.normal(dy, (BATCH, length, HEADS, head))


def run(function, qkv: Array, dy: Array, rope: short_attention.Rope | None) -> tuple[Array, Array]:
    """The result and the gradient."""

    @jax.jit
    def both(qkv: Array, dy: Array) -> tuple[Array, Array]:
        y, pull_back = jax.vjp(lambda qkv: function(qkv, rope), qkv)
        return y, pull_back(dy)[0]

    return both(qkv, dy)


@pytest.mark.parametrize(("length", "head", "rotary"), CASES)
def test_it_is_attention(length: int, head: int, rotary: bool) -> None:
    rope = layers.rope_tables(length, head, 10_000.0) if rotary else None
    qkv, dy = values(length, head)
    for found, expected in zip(run(fused, qkv, dy, rope), run(plain, qkv, dy, rope), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def error(found: Array, exact: Array) -> float:
    """Relative, over all values."""
    difference = np.asarray(found, np.float32) - np.asarray(exact)
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))


@pytest.mark.parametrize(("length", "head", "rotary"), CASES[:2])
def test_it_rounds_no_more_than_the_plain_formula(length: int, head: int, rotary: bool) -> None:
    rope = layers.rope_tables(length, head, 10_000.0) if rotary else None
    qkv, dy = (x.astype(jnp.bfloat16) for x in values(length, head))
    exact = run(plain, qkv.astype(jnp.float32), dy.astype(jnp.float32), rope)
    ours = run(fused, qkv, dy, rope)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes
        theirs = run(plain, qkv, dy, rope)
    for y, other, expected in zip(ours, theirs, exact, strict=True):
        assert y.dtype == jnp.bfloat16
        assert error(y, expected) <= 1.5 * error(other, expected) + 1e-6


def test_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(length: int = 97, head: int = 64, dtype: str = "bfloat16", mesh: MeshConfig | None = None) -> object:
        placement = ANYWHERE if mesh is None else sharding.place(sharding.make_mesh(mesh), {})
        qkv = jax.ShapeDtypeStruct((8, length, 3, 2, head), dtype)
        return jax.eval_shape(lambda qkv: short_attention.fused(qkv, None, placement), qkv)

    assert choose() is None  # no GPU
    monkeypatch.setattr(sharding.Placement, "kernels", "hopper")
    assert choose() is not None
    assert choose(length=129) is None
    assert choose(head=48) is None
    assert choose(head=16) is None
    assert choose(dtype="float32") is None
    assert choose(mesh=MeshConfig(data=4, tensor=2)) is None


@pytest.mark.parametrize(("length", "head", "rotary"), CASES)
def test_it_lowers_for_a_gpu(length: int, head: int, rotary: bool) -> None:
    """Triton takes less than the interpreter does; to lower needs no GPU."""
    rope = layers.rope_tables(length, head, 10_000.0) if rotary else None
    qkv = jax.ShapeDtypeStruct((BATCH, length, 3, HEADS, head), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda qkv: jnp.sum(short_attention.attend(qkv, rope).astype(jnp.float32))))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = gradient.trace(qkv).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("xla.gpu.triton") == 2  # forward, backward
