"""Which shapes take the Mosaic kernels, that they lower for a GPU, and what they compute in Mosaic's interpreter. It
lacks some of what they need, products with a left side in registers above all, for which the tests have plain ones.
`benchmarks/kernels.py` compares all of them with the plain formula on a GPU."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode  # no public name
from jax._src.state.types import TransformedRef, TransposeTransform
from jax.experimental.pallas import mosaic_gpu as mg
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from tinypod.kernels import hopper_mixing, token_mixing
from tinypod.models import layers
from tinypod.sharding import ANYWHERE

needs_jax_0_11 = pytest.mark.skipif(not hopper_mixing.LOWERS, reason="the Mosaic kernels need jax 0.11")

RECIPE = {"B": 768, "T": 97, "D": 512, "F": 512}


def abstract(B: int, T: int, D: int, F: int, dtype: Any = jnp.bfloat16) -> tuple[Any, Any, Any]:
    """gate_up, down and x."""
    weights = jax.ShapeDtypeStruct((T, 2, F), jnp.float32), jax.ShapeDtypeStruct((F, T), jnp.float32)
    return *weights, jax.ShapeDtypeStruct((B, T, D), dtype)


def with_gradients(gate_up: Array, down: Array, x: Array) -> Any:
    y, pull_back = jax.vjp(lambda *arrays: token_mixing.mix(*arrays, 1e-5), gate_up, down, x)
    return y, pull_back(y)


def kernels_of(function: Any, *arrays: Any) -> list[str]:
    """In a traced function: a Mosaic kernel's name begins with mosaic_."""
    text = str(jax.make_jaxpr(lambda *arrays: function(*arrays))(*arrays))  # of its own, since JAX caches traces
    names = ("token_mixing", "token_mixing_backward", "token_mixing_weights")
    return [name for kernel in names for name in (f"mosaic_{kernel}", kernel) if f"name={name}\n" in text]


@needs_jax_0_11
def test_the_recipes_shape_takes_the_mosaic_kernels() -> None:
    assert kernels_of(with_gradients, *abstract(**RECIPE)) == [
        "mosaic_token_mixing",
        "mosaic_token_mixing_backward",
        "mosaic_token_mixing_weights",
    ]


TRITON = ["token_mixing", "token_mixing_backward", "token_mixing_weights"]


@pytest.mark.parametrize(
    "differs",
    [
        {"dtype": jnp.float16},
        {"B": 769},  # rows that 8 does not divide
        {"T": 64},  # Triton pads these to 64
        {"T": 122},  # more than a shifted window holds
        {"D": 448},
        {"F": 480},
        {"F": 192},  # no more steps than slots
        {"B": 32},  # fewer blocks than multiprocessors
        {"B": 33, "D": 200, "F": 272},
    ],
)
def test_other_shapes_take_tritons(differs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_mixing, "LOWERS", True)
    assert kernels_of(with_gradients, *abstract(**(RECIPE | differs))) == TRITON


@pytest.mark.parametrize(
    "differs",
    [
        {"T": 98},  # sums that do not fit the registers
        {"B": 776},  # 97 * 8: the examples of a shift cannot be shared, and half of the GPU would be idle
        {"F": 2048},  # more tiles of inner units than fit beside each other eight times
    ],
)
def test_the_gradient_of_the_weights_alone_may_be_tritons(
    differs: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_mixing, "LOWERS", True)
    _, down, x = abstract(**(RECIPE | differs))
    assert hopper_mixing.suits(down, x)
    assert hopper_mixing.weight_splits(down, x) is None


@pytest.mark.parametrize(("B", "F", "splits"), [(768, 512, 16), (768, 256, 32), (1024, 320, 16), (768, 320, 24)])
def test_splits_share_the_examples_of_each_shift(B: int, F: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_mixing, "LOWERS", True)
    _, down, x = abstract(**(RECIPE | {"B": B, "F": F}))
    assert hopper_mixing.weight_splits(down, x) == splits


def test_before_jax_0_11_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_mixing, "LOWERS", False)
    assert kernels_of(with_gradients, *abstract(**RECIPE)) == TRITON


@needs_jax_0_11
def test_a_pack_takes_tritons() -> None:
    pack = jax.tree.map(lambda one: jax.ShapeDtypeStruct((2, *one.shape), one.dtype), abstract(**RECIPE))
    assert kernels_of(jax.vmap(with_gradients), *pack) == TRITON
    shared = *abstract(**RECIPE)[:2], pack[2]  # the same weights for all
    assert kernels_of(jax.vmap(with_gradients, in_axes=(None, None, 0)), *shared) == TRITON
    expected = jax.eval_shape(jax.vmap(lambda *arrays: token_mixing.mix(*arrays, 1e-5, True)), *pack)
    assert jax.eval_shape(jax.vmap(lambda *arrays: token_mixing.mix(*arrays, 1e-5)), *pack) == expected


@pytest.mark.parametrize("version", range(8))
def test_a_shifted_version_of_the_weights_is_0_beyond_them(version: int) -> None:
    shifted = hopper_mixing._shifted(jnp.ones((97, 3)), 104)
    assert shifted.shape == (8, 104, 3)
    assert (jnp.flatnonzero(shifted[version, :, 0]) == jnp.arange(version, version + 97)).all()


@needs_jax_0_11
def test_the_gradient_of_the_weights_alone_is_tritons_in_a_step() -> None:
    mixed = ["mosaic_token_mixing", "mosaic_token_mixing_backward", "token_mixing_weights"]
    assert kernels_of(with_gradients, *abstract(**(RECIPE | {"T": 98}))) == mixed


@needs_jax_0_11
def test_they_lower_for_a_gpu_and_state_their_products() -> None:
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(with_gradients).trace(*abstract(**RECIPE)).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "custom_call @mosaic_gpu" in line]
    assert len(calls) == 3
    one = 2 * 768 * 97 * 512 * 512
    for line, products in zip(calls, (3, 5, 6), strict=True):
        assert f'"flops": "{products * one}"'.replace('"', r"\22") in line


@needs_jax_0_11
def test_the_gradient_of_the_weights_is_the_formulas() -> None:
    B, T, D, F = 8, 97, 128, 64
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.tree.map(lambda stacked: stacked[0], layers.swiglu_init(keys[0], 1, T, F))
    x, dr = (jax.random.normal(key, (B, T, D), jnp.bfloat16) for key in keys[1:])
    with mg.force_gpu_interpret_mode(mg.InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized")):
        gradients = hopper_mixing.weight_gradients(weights["gate_up"], weights["down"], x, dr, splits=8)
    _, pull_back = jax.vjp(lambda weights: layers.token_swiglu(weights, x.astype(jnp.float32), ANYWHERE), weights)
    (expected,) = pull_back(dr.astype(jnp.float32))
    for ours, theirs in zip(gradients, (expected["gate_up"], expected["down"]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.01 * float(jnp.abs(theirs).max()))


def value_of(operand: Any) -> Array:
    """In registers, or in shared memory, there perhaps transposed; in float32, in which products are added up."""
    if isinstance(operand, TransformedRef) and isinstance(operand.transforms[-1], TransposeTransform):
        return TransformedRef(operand.ref, operand.transforms[:-1])[...].T.astype(jnp.float32)
    return operand[...].astype(jnp.float32)


def multiply(sums: Any, left: Any, right: Any) -> None:
    sums[...] += value_of(left) @ value_of(right)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With fewer multiprocessors than blocks, and not a multiple: some take one more than others."""
    monkeypatch.setattr(hopper_mixing, "MULTIPROCESSORS", 3)
    monkeypatch.setattr(mg, "wgmma", multiply)
    monkeypatch.setattr(mg, "async_prefetch", lambda ref: None)
    monkeypatch.setattr(mg, "layout_cast", lambda values, layout: values)
    monkeypatch.setattr(mg, "broadcasted_iota", lambda *given, layout: jax.lax.broadcasted_iota(*given))
    monkeypatch.setattr(mg, "ACC", mg.MemorySpace.REGS)
    monkeypatch.setattr(hopper_mixing, "TILE", mg.ACC((64, 64), jnp.float32))
    monkeypatch.setattr(hopper_mixing, "load", lambda ref, layout, optimized: ref[...])
    monkeypatch.setattr(hopper_mixing, "_loaded", lambda ref: ref[...].T)
    monkeypatch.setattr(hopper_mixing, "_store", lambda ref, values: ref.__setitem__(..., values.T))
    jax.clear_caches()
    params = InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    with force_gpu_interpret_mode(params):
        yield
    jax.clear_caches()


GATES = pytest.mark.parametrize("gate", ["swiglu", "normalised"])


def example(B: int, T: int, D: int, F: int) -> tuple[dict[str, Array], Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.tree.map(lambda stacked: stacked[0], layers.swiglu_init(keys[0], 1, T, F))
    x, given = (jax.random.normal(key, (B, T, D), jnp.bfloat16) for key in keys[1:])
    return weights, x, given


def error(found: Array, exact: Array) -> float:
    return float(jnp.linalg.norm((found.astype(jnp.float32) - exact).ravel()) / jnp.linalg.norm(exact.ravel()))


@GATES
@pytest.mark.slow
def test_forward_and_backward_are_the_formula(gate: layers.Gate, interpreted: None, monkeypatch: Any) -> None:
    """Examples of several shifts; one thread block has two blocks of channels, the others one."""
    monkeypatch.setattr(hopper_mixing, "FORWARD_SLOTS", 2)
    F, epsilon = 192, 1e-5 if gate == "normalised" else None
    weights, x, dy = example(4, 97, 128, F)
    given = weights["gate_up"], weights["down"], x
    y, *scales = hopper_mixing.forward(*given, epsilon=1e-5, gate_epsilon=epsilon)
    dx, dr, *along = hopper_mixing.backward(*given, y, scales[0], dy, *scales[1:])

    def added(x: Array) -> Array:
        return layers.token_swiglu(weights, x, ANYWHERE, gate)

    x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    exact, pull_back = jax.vjp(lambda x: layers.rms_norm(x + added(x), axis=1), x)
    (exact_dr,) = jax.vjp(lambda r: layers.rms_norm(r, axis=1), x + added(x))[1](dy)
    assert error(y, exact) < 0.01
    assert error(dx, pull_back(dy)[0]) < 0.02
    if gate == "swiglu":
        assert error(dr, exact_dr) < 0.02
        return
    gates, ups = (jnp.einsum("btd,tf->bfd", x, weights["gate_up"][:, i]) for i in range(2))
    scale = 1 / jnp.sqrt(jnp.mean((gates * ups) ** 2, axis=1) + 1e-5)
    assert error(scales[1], scale) < 0.01
    assert error(dr, exact_dr * scale[:, None]) < 0.02
    assert error(along[0], -jnp.sum(exact_dr * added(x), axis=1) * scale**2 / F) < 0.05


@pytest.mark.slow
@GATES
def test_the_gradient_of_the_weights_is_that_of_either_gate(gate: layers.Gate, interpreted: None) -> None:
    """`along` is the gradient of each half square of gate · up, one number for each example and channel."""
    weights, x, dr = example(8, 97, 128, 64)
    along = jax.random.normal(jax.random.key(5), (8, 128)) * float(gate == "normalised")
    given = (weights["gate_up"], weights["down"], x, dr, *([along] if gate == "normalised" else []))
    found = hopper_mixing.weight_gradients(*given, splits=8)

    def loss(weights: Any) -> Array:
        gates, ups = (jnp.einsum("btd,tf->bfd", x.astype(jnp.float32), weights["gate_up"][:, i]) for i in range(2))
        y = jnp.einsum("bfd,ft->btd", jax.nn.silu(gates) * ups, weights["down"])
        return jnp.sum(y * dr.astype(jnp.float32)) + jnp.sum((gates * ups) ** 2 * along[:, None]) / 2

    expected = jax.grad(loss)(weights)
    for ours, theirs in zip(found, (expected["gate_up"], expected["down"]), strict=True):
        assert error(ours, theirs) < 0.01
