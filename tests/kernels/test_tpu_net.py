"""The TPU's kernel of the recursion's net against the plain net, in Pallas' interpreter."""

import itertools
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod import config as configs
from tinypod import sharding
from tinypod.experiment import ExperimentConfig, build
from tinypod.kernels import tpu_layers, tpu_net
from tinypod.models import layers, trm
from tinypod.sharding import ANYWHERE, MeshConfig, Placement
from tpu import needs_compiler, run

WIDTH = 32


HEADS = 2
MLP = trm.MlpMixing()
ROTARY = trm.AttentionMixing(num_heads=HEADS)
ATTENTION = trm.AttentionMixing(num_heads=HEADS, positions=trm.NoPositions())


def make(
    length: int,
    batch: int,
    dtype: str = "float32",
    num_layers: int = 2,
    mixing: trm.MlpMixing | trm.AttentionMixing = MLP,
) -> tuple[trm.TrmConfig, trm.Params, jax.Array, jax.Array]:
    config = trm.TrmConfig(
        hidden_size=WIDTH,
        num_layers=num_layers,
        H_cycles=1,
        L_cycles=1,
        mlp_multiple_of=8,
        mixing=mixing,
        puzzle_embedding=trm.NoPuzzleTable(),
    )
    params = trm.init(config, trm.PuzzleShape(length, 11, 1), jax.random.key(0))["layers"]
    h, injection = (
        jax.random.normal(key, (batch, length, WIDTH)).astype(dtype) for key in jax.random.split(jax.random.key(1))
    )
    return config, params, h, injection


def plain(config: trm.TrmConfig, params: trm.Params, h: jax.Array, injection: jax.Array | None) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):  # attention of jax.nn in bfloat16 is not strict
        return jax.jit(trm.make_net(config, h.shape[1], ANYWHERE))(params, h, injection)


def fused(
    config: trm.TrmConfig,
    params: trm.Params,
    h: jax.Array,
    injection: jax.Array | None,
    placement: Placement = ANYWHERE,
) -> jax.Array:
    rope = None
    if config.mixing == ROTARY:
        rope = layers.rope_tables(h.shape[1], WIDTH // HEADS, config.mixing.positions.theta)

    def apply(params: trm.Params, h: jax.Array, injection: jax.Array | None) -> jax.Array:
        net = tpu_net.pack(params, h.shape[1], h.dtype, rope)
        return tpu_net.apply(net, h, injection, placement, epsilon=layers.RMS_EPSILON, num_heads=HEADS, interpret=True)

    return jax.jit(apply)(params, h, injection)


@pytest.mark.parametrize("mixing", [MLP, ROTARY, ATTENTION], ids=["mlp", "rotary", "attention"])
@pytest.mark.parametrize("length", [97, 37, pytest.param(16, marks=pytest.mark.slow)])
def test_the_kernel_is_the_net(length: int, mixing: trm.MlpMixing | trm.AttentionMixing) -> None:
    config, params, h, injection = make(length, batch=3, mixing=mixing)
    np.testing.assert_allclose(fused(config, params, h, injection), plain(config, params, h, injection), atol=1e-5)


def test_nothing_need_be_injected() -> None:
    config, params, h, _ = make(9, batch=3)
    np.testing.assert_allclose(fused(config, params, h, None), plain(config, params, h, None), atol=1e-5)


@pytest.mark.parametrize("batch", [1, 8, 11])
def test_batches_need_not_be_whole_blocks(batch: int) -> None:
    config, params, h, injection = make(9, batch)
    found = fused(config, params, h, injection)
    assert found.shape == h.shape
    np.testing.assert_allclose(found, plain(config, params, h, injection), atol=1e-5)


def test_little_memory_takes_a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config, params, h, injection = make(9, batch=5, num_layers=3)
    size = sum(4 * weight.size for weight in jax.tree.leaves(params))
    expected = plain(config, params, h, injection)

    def count_calls(vmem_bytes: int) -> int:
        monkeypatch.setattr(tpu_layers, "_OTHER", tpu_layers._OTHER._replace(vmem_bytes=vmem_bytes))
        np.testing.assert_allclose(fused(config, params, h, injection), expected, atol=1e-5)
        return str(jax.make_jaxpr(partial(fused, config))(params, h, injection)).count("pallas_call[")

    assert count_calls(4 * size) == 1
    assert count_calls(size) == 3


@pytest.mark.parametrize("mixing", [MLP, ROTARY], ids=["mlp", "rotary"])
@pytest.mark.parametrize("length", [97, 37])
def test_in_bfloat16_it_is_as_near_to_float32_as_the_plain_net(
    length: int, mixing: trm.MlpMixing | trm.AttentionMixing
) -> None:
    config, params, h, injection = make(length, batch=3, dtype="bfloat16", mixing=mixing)
    params = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16).astype(jnp.float32), params)
    exact = plain(config, params, h.astype(jnp.float32), injection.astype(jnp.float32))

    def error(found: jax.Array) -> float:
        assert found.dtype == jnp.bfloat16
        return float(jnp.sqrt(jnp.mean(jnp.square(found.astype(jnp.float32) - exact))))

    assert error(fused(config, params, h, injection)) < 1.5 * error(plain(config, params, h, injection)) < 0.02


def test_an_example_is_alone() -> None:
    """Neither the others of its block nor what is behind the last one reaches it."""
    config, params, h, injection = make(9, batch=5)
    together = fused(config, params, h, injection)
    poisoned = fused(config, params, h.at[2].set(jnp.nan), injection)
    others = np.array([0, 1, 3, 4])
    np.testing.assert_array_equal(together[others], poisoned[others])
    assert np.isnan(poisoned[2]).all()


@pytest.mark.parametrize("mesh", [MeshConfig(data=8), MeshConfig(data=2, fsdp=4)])
def test_on_eight_devices_it_is_the_same(mesh: MeshConfig) -> None:
    config, params, h, injection = make(9, batch=24)
    placement = sharding.place(sharding.make_mesh(mesh), {})
    found = fused(config, params, h, injection, placement)
    assert len({str(shard.index) for shard in found.addressable_shards}) == 8
    np.testing.assert_allclose(found, plain(config, params, h, injection), atol=1e-5)


def test_runs_that_are_packed_together_have_weights_of_their_own() -> None:
    config, params, h, injection = make(9, batch=5)
    both = jax.tree.map(lambda weight: jnp.stack([weight, 2 * weight]), params)
    found = jax.vmap(lambda params: fused(config, params, h, injection))(both)
    for i in range(2):
        one = jax.tree.map(lambda weight, i=i: weight[i], both)
        np.testing.assert_allclose(found[i], plain(config, one, h, injection), atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "dtype", "mesh", "suited"),
    [
        ({}, "bfloat16", MeshConfig(), True),
        ({"mixing": trm.AttentionMixing()}, "bfloat16", MeshConfig(data=2, fsdp=4), True),
        ({}, "bfloat16", MeshConfig(data=4, tensor=2), False),
        ({}, "float16", MeshConfig(), False),
        ({}, "float32", MeshConfig(), False),  # no room for a layer
        ({"hidden_size": 192}, "bfloat16", MeshConfig(), False),
        ({"mlp_multiple_of": 8}, "bfloat16", MeshConfig(), False),
        ({"mixing": trm.AttentionMixing(num_heads=32)}, "bfloat16", MeshConfig(), False),
    ],
)
def test_what_suits_it(
    overrides: dict, dtype: str, mesh: MeshConfig, suited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"hidden_size": 512, "num_layers": 2, "H_cycles": 1, "L_cycles": 1, "mixing": MLP}
    config = trm.TrmConfig(**base | overrides, puzzle_embedding=trm.NoPuzzleTable())
    params = jax.eval_shape(lambda key: trm.init(config, trm.PuzzleShape(97, 11, 1), key), jax.random.key(0))["layers"]
    placement = sharding.place(sharding.make_mesh(mesh), {})
    assert not tpu_net.suits(params, 97, jnp.dtype(dtype), placement)  # these are CPUs
    monkeypatch.setattr(sharding.Placement, "kernels", "tpu")
    assert tpu_net.suits(params, 97, jnp.dtype(dtype), placement) is suited
    assert not tpu_net.suits(params, 97, jnp.dtype(dtype), ANYWHERE)


@pytest.mark.parametrize(
    ("mixing", "overrides"),
    [
        (MLP, {}),
        (ROTARY, {}),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in itertools.product(
                (MLP, ROTARY), ({"separate_nets": True}, {"one_step_gradient": True}, {"single_z": True})
            )
        ),
    ],
)
def test_a_step_with_it_is_a_step_without(
    mixing: trm.MlpMixing | trm.AttentionMixing, overrides: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cycles without gradients; in all of them where nothing is differentiated."""
    config = make(9, 1, mixing=mixing)[0].model_copy(
        update={"H_cycles": 2, "L_cycles": 2, "dtype": "float32", **overrides}
    )
    params = trm.init(config, trm.PuzzleShape(9, 11, 1), jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 9), 1, 11)

    def step(params: trm.Params, gradients: bool) -> Any:
        z, logits, q = trm.apply(config, params, trm.initial_z(config, params, 3, 9), tokens, None, gradients=gradients)
        return jnp.sum(jnp.square(logits)), (z, logits, q)

    def both() -> Any:
        return jax.jit(jax.grad(partial(step, gradients=True), has_aux=True))(params), jax.jit(
            partial(step, gradients=False)
        )(params)

    def count_kernels(gradients: bool) -> int:
        return str(jax.make_jaxpr(partial(step, gradients=gradients))(params)).count("pallas_call[")

    expected = both()
    monkeypatch.setattr(tpu_net, "suits", lambda *given: True)
    monkeypatch.setattr(tpu_net, "apply", partial(tpu_net.apply, interpret=True))
    assert 0 < count_kernels(gradients=True) < count_kernels(gradients=False)
    for ours, theirs in zip(*map(jax.tree.leaves, (both(), expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * float(jnp.abs(theirs).max()) + 1e-6)


@pytest.mark.parametrize("config", ["trm/sudoku_mlp", "trm/sudoku_attention"])
@pytest.mark.parametrize("mesh", ["{devices: 1}", "{devices: 8, data: 4, fsdp: 2}"])
def test_a_step_with_it_lowers_for_a_tpu(config: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is around it must leave nothing of it to the partitioner; lowering says so, and needs no TPU."""
    monkeypatch.setattr(sharding.Placement, "kernels", "tpu")
    overrides = ("data.path=nowhere", "data.expected.rows=100", "batch_size=16", "model.unroll=false", f"mesh={mesh}")
    experiment = build(configs.load(config, overrides, ExperimentConfig), planned=True)
    with jax.numpy_dtype_promotion("standard"):  # attention of jax.nn in bfloat16 is not strict
        lowered = experiment.train_step.trace(*experiment.abstract_inputs).lower(lowering_platforms=("tpu",))
    text = lowered.as_text()
    assert all(name in text for name in ("recursion_net", "channel_mlp", "channel_mlp_backward"))
    assert ("token_mixing_backward" in text) == config.endswith("mlp")


PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from tinypod import sharding
from tinypod.kernels import tpu_layers, tpu_net
from tinypod.models import layers, trm
from tinypod.planning import slices

target, mixing = json.load(sys.stdin)
devices = topologies.get_topology_desc(**slices.find_slice(target).topology_arguments()).devices
placement = sharding.place(sharding.make_mesh(sharding.MeshConfig(), devices), {})
config = trm.TrmConfig(
    hidden_size=512, num_layers=2, H_cycles=1, L_cycles=1, mixing={"kind": mixing}, puzzle_embedding={"kind": "none"}
)
rope = layers.rope_tables(97, 64, 1e4) if mixing == "attention" else None
rows = jax.NamedSharding(placement.mesh, jax.P("data"))
params = jax.eval_shape(lambda key: trm.init(config, trm.PuzzleShape(97, 11, 1), key)["layers"], jax.random.key(0))
x = jax.ShapeDtypeStruct((768, 97, 512), jnp.bfloat16, sharding=rows)


def apply(params, h, x):
    net = tpu_net.pack(params, 97, h.dtype, rope)
    return tpu_net.apply(net, h, x, placement, epsilon=1e-5, num_heads=8)


print(jax.jit(apply).trace(params, x, x).lower().compile().as_text().count("tpu_custom_call"))
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["mlp", "attention"])
@pytest.mark.parametrize(("target", "calls"), [("v4-8", 2), ("v5e-4", 1), ("v5p-8", 1), ("v6e-4", 1)])
def test_the_compiler_takes_it(target: str, calls: int, mixing: str) -> None:
    """At the recipes' sizes: both layers at once, on a v4 one after the other."""
    assert int(run(PROGRAM, json.dumps([target, mixing])).split()[-1]) == calls
