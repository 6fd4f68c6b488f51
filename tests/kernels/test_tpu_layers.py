"""The TPU's half layers and their gradients against the plain formulas, in Pallas' interpreter."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod import sharding
from tinypod.kernels import tpu_layers
from tinypod.kernels.calling import by_rows
from tinypod.models import layers, trm
from tinypod.sharding import ANYWHERE, MeshConfig
from tpu import needs_compiler, run

WIDTH, INNER = 32, 24
SETTINGS = tpu_layers.Settings(layers.RMS_EPSILON, tpu_layers.CHIPS["TPU v4"], interpret=True)
KINDS = {"tokens": tpu_layers.mix_tokens, "channels": tpu_layers.mix_channels}


def plain(kind: str, gate_up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    params = {"gate_up": gate_up, "down": down}
    if kind == "tokens":
        return layers.token_block(params, x, ANYWHERE)
    return layers.mlp_block(params, x, ANYWHERE)


def fused(kind: str, gate_up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    return KINDS[kind](gate_up, down, x, SETTINGS)


def make(kind: str, length: int, batch: int, dtype: str = "float32") -> tuple[jax.Array, ...]:
    """Weights, input, and the gradient of the output."""
    keys, size = jax.random.split(jax.random.key(0), 4), length if kind == "tokens" else WIDTH
    gate_up = jax.random.normal(keys[0], (size, 2, INNER)) / size**0.5
    down = jax.random.normal(keys[1], (INNER, size)) / INNER**0.5
    x, dy = (jax.random.normal(key, (batch, length, WIDTH)).astype(dtype) for key in keys[2:])
    return gate_up, down, x, dy


@partial(jax.jit, static_argnums=0)
def with_gradients(f: Callable[..., jax.Array], gate_up: Any, down: Any, x: Any, dy: Any) -> tuple[jax.Array, ...]:
    y, pullback = jax.vjp(f, gate_up, down, x)
    return y, *pullback(dy)


def assert_close(found: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "batch"),
    [(97, 3), (37, 8), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in [(16, 4), (9, 1), (9, 11)])],
)
def test_the_kernels_are_the_half_layers(kind: str, length: int, batch: int) -> None:
    """Also where the last block of examples is not full: what is behind the last one adds nothing to a gradient."""
    given = make(kind, length, batch)
    expected = with_gradients(partial(plain, kind), *given)
    assert_close(with_gradients(partial(fused, kind), *given), expected)
    assert_close(jax.jit(partial(fused, kind))(*given[:3]), expected[0])  # where nothing is kept for a backward pass


def test_a_wide_token_mlp_takes_some_channels_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = make("tokens", 9, 5)
    expected = with_gradients(partial(plain, "tokens"), *given)
    monkeypatch.setattr(tpu_layers, "CHANNELS", WIDTH // 4)
    assert_close(with_gradients(partial(fused, "tokens"), *given), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [97, pytest.param(37, marks=pytest.mark.slow)])
def test_in_bfloat16_they_are_as_near_to_float32_as_the_plain_formulas(kind: str, length: int) -> None:
    gate_up, down, x, dy = make(kind, length, 3, "bfloat16")
    gate_up, down = (weight.astype(jnp.bfloat16).astype(jnp.float32) for weight in (gate_up, down))
    exact = with_gradients(partial(plain, kind), gate_up, down, x.astype(jnp.float32), dy.astype(jnp.float32))

    def errors(f: Callable[..., jax.Array]) -> np.ndarray:
        found = with_gradients(f, gate_up, down, x, dy)
        assert [array.dtype for array in found] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.bfloat16]
        pairs = zip(found, exact, strict=True)
        return np.array([float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) for a, b in pairs])

    ours, theirs = errors(partial(fused, kind)), errors(partial(plain, kind))
    assert (theirs < 0.02).all(), theirs
    assert (ours < 1.5 * theirs).all(), (ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [MeshConfig(data=8), MeshConfig(data=2, fsdp=4)])
def test_on_eight_devices_they_are_the_same(kind: str, mesh: MeshConfig) -> None:
    given = make(kind, 9, 24)
    placement = sharding.place(sharding.make_mesh(mesh), {})
    rows = by_rows(partial(fused, kind), placement, num_weights=2)
    assert_close(with_gradients(rows, *given), with_gradients(partial(plain, kind), *given))


@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_are_packed_together_have_weights_of_their_own(kind: str) -> None:
    gate_up, down, x, dy = make(kind, 9, 5)
    both = jnp.stack([gate_up, 2 * gate_up])
    found = jax.vmap(lambda gate_up: with_gradients(partial(fused, kind), gate_up, down, x, dy))(both)
    for i in range(2):
        expected = with_gradients(partial(plain, kind), both[i], down, x, dy)
        assert_close([array[i] for array in found], expected)


@pytest.mark.parametrize(
    ("shape", "inner", "dtype", "mesh", "suited"),
    [
        ((8, 97, 512), 1536, "bfloat16", MeshConfig(), True),
        ((8, 97, 512), 1536, "bfloat16", MeshConfig(data=4, tensor=2), False),
        ((8, 97, 512), 1536, "float16", MeshConfig(), False),
        ((8, 97, 512), 1536, "float32", MeshConfig(), False),  # no room for the weights
        ((8, 901, 512), 1536, "bfloat16", MeshConfig(), False),  # nor for an example
        ((8, 97, 192), 512, "bfloat16", MeshConfig(), False),
        ((8, 97, 512), 200, "bfloat16", MeshConfig(), False),
    ],
)
def test_what_suits_them(
    shape: tuple[int, ...], inner: int, dtype: str, mesh: MeshConfig, suited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [jnp.zeros((shape[2], 2, inner)), jnp.zeros((inner, shape[2])), jnp.zeros(shape, dtype)]
    placement = sharding.place(sharding.make_mesh(mesh), {})

    def choose() -> bool:
        return jax.eval_shape(lambda *arrays: tpu_layers.channel_block(*arrays, 1e-5, placement), *given) is not None

    assert not choose()  # these are CPUs
    monkeypatch.setattr(sharding.Placement, "kernels", "tpu")
    assert choose() is suited


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"unroll": False}, {"one_step_gradient": True}, {"remat": True}])
def test_a_step_with_them_is_a_step_without(overrides: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    config = trm.TrmConfig(
        **{"hidden_size": WIDTH, "num_layers": 2, "H_cycles": 2, "L_cycles": 2, "mlp_multiple_of": 8},
        **{"mixing": trm.MlpMixing(), "puzzle_embedding": trm.NoPuzzleTable(), "dtype": "float32"} | overrides,
    )
    params = trm.init(config, trm.PuzzleShape(9, 11, 1), jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 9), 1, 11)

    def loss(params: trm.Params) -> tuple[jax.Array, Any]:
        z, logits, _ = trm.apply(config, params, trm.initial_z(config, params, 3, 9), tokens, None)
        return jnp.sum(jnp.square(logits)), (z, logits)

    step = jax.grad(loss, has_aux=True)
    expected = jax.jit(step)(params)
    monkeypatch.setattr(layers, "token_block", lambda weights, x, *_: fused("tokens", *pair(weights), x))
    monkeypatch.setattr(layers, "mlp_block", lambda weights, x, *_: fused("channels", *pair(weights), x))
    assert "token_mixing_backward" in str(jax.make_jaxpr(lambda params: step(params))(params))
    found = jax.jit(lambda params: step(params))(params)  # another function: the first is compiled already
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * float(jnp.abs(theirs).max()) + 1e-6)


def pair(weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return weights["gate_up"], weights["down"]


PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from tinypod import sharding
from tinypod.kernels import tpu_layers
from tinypod.planning import slices

target, kind = json.load(sys.stdin)
devices = topologies.get_topology_desc(**slices.find_slice(target).topology_arguments()).devices
placement = sharding.place(sharding.make_mesh(sharding.MeshConfig(), devices), {})
rows = jax.NamedSharding(placement.mesh, jax.P("data"))
block, size, inner = (tpu_layers.token_block, 97, 512) if kind == "tokens" else (tpu_layers.channel_block, 512, 1536)
weights = jax.ShapeDtypeStruct((size, 2, inner), jnp.float32), jax.ShapeDtypeStruct((inner, size), jnp.float32)
x = jax.ShapeDtypeStruct((768, 97, 512), jnp.bfloat16, sharding=rows)


def gradients(gate_up, down, x, dy):
    return jax.vjp(lambda *given: block(*given, 1e-5, placement), gate_up, down, x)[1](dy)


print(jax.jit(gradients).trace(*weights, x, x).lower().compile().as_text().count("tpu_custom_call"))
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["v4-8", "v5e-4", "v5p-8", "v6e-4"])
def test_the_compiler_takes_them(target: str, kind: str) -> None:
    assert int(run(PROGRAM, json.dumps([target, kind])).split()[-1]) == 2
