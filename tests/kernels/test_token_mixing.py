"""The kernel in Pallas' interpreter, against the plain formula; `benchmarks/kernels.py` compares them on a GPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from tinypod import config as configs
from tinypod import sharding
from tinypod.experiment import ExperimentConfig, build
from tinypod.kernels import calling, token_mixing
from tinypod.models import layers
from tinypod.sharding import ANYWHERE, MeshConfig

Weights = dict[str, Array]


GATES = pytest.mark.parametrize("gate", ["swiglu", "normalised"])


def plain(weights: Weights, x: Array, gate: layers.Gate) -> Array:
    return layers.rms_norm(x + layers.token_swiglu(weights, x, ANYWHERE, gate), axis=1)


def fused(weights: Weights, x: Array, gate: layers.Gate) -> Array:
    epsilon = 1e-5 if gate == "normalised" else None
    return token_mixing.mix(weights["gate_up"], weights["down"], x, layers.RMS_EPSILON, True, epsilon)


def example(batch: int, positions: int, width: int, inner: int) -> tuple[Weights, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.tree.map(lambda stacked: stacked[0], layers.swiglu_init(keys[0], 1, positions, inner))
    x, given = (jax.random.normal(key, (batch, positions, width)) for key in keys[1:])
    return weights, x, given


def with_gradients(
    function: Callable[..., Array], gate: layers.Gate, weights: Weights, x: Array, given: Array
) -> list[Array]:
    y, pull_back = jax.vjp(jax.jit(lambda *arrays: function(*arrays, gate)), weights, x)
    return jax.tree.leaves((y, pull_back(given)))


SHAPES = [
    (3, 97, 64, 32),
    (2, 97, 200, 64),  # channels that do not fill their last block
    pytest.param((2, 37, 48, 96), marks=pytest.mark.slow),
    pytest.param((5, 3, 16, 16), marks=pytest.mark.slow),
    pytest.param((1, 128, 32, 48), marks=pytest.mark.slow),
]


@GATES
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_the_formula(shape: tuple[int, int, int, int], gate: layers.Gate) -> None:
    weights, x, given = example(*shape)
    for ours, theirs in zip(
        with_gradients(fused, gate, weights, x, given), with_gradients(plain, gate, weights, x, given), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(jnp.abs(theirs).max()))


@GATES
def test_in_bfloat16_it_is_no_further_from_the_truth_than_the_formula(gate: layers.Gate) -> None:
    weights, x, given = example(3, 97, 64, 64)
    half, given_half = x.astype(jnp.bfloat16), given.astype(jnp.bfloat16)
    truth = with_gradients(plain, gate, weights, half.astype(jnp.float32), given_half.astype(jnp.float32))

    def errors(function: Callable[..., Array]) -> list[float]:
        found = with_gradients(function, gate, weights, half, given_half)
        return [
            float(jnp.linalg.norm((one.astype(jnp.float32) - true).ravel()) / jnp.linalg.norm(true.ravel()))
            for one, true in zip(found, truth, strict=True)
        ]

    for ours, theirs in zip(errors(fused), errors(plain), strict=True):
        assert ours < 1.1 * theirs < 0.02


@GATES
def test_runs_in_a_pack_have_weights_of_their_own(gate: layers.Gate) -> None:
    weights, x, given = example(2, 20, 16, 32)
    pack = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), (weights, x, given))
    together = jax.vmap(lambda *arrays: with_gradients(fused, gate, *arrays))(*pack)
    for number in range(2):
        alone = with_gradients(plain, gate, *jax.tree.map(lambda leaf, number=number: leaf[number], pack))
        for ours, theirs in zip(together, alone, strict=True):
            np.testing.assert_allclose(ours[number], theirs, atol=1e-4 * float(jnp.abs(theirs).max()))


@GATES
@pytest.mark.parametrize(("batch", "rows"), [(8, 1), (3, 3)])
def test_eight_devices_share_the_rows(batch: int, rows: int, gate: layers.Gate) -> None:
    weights, x, given = example(batch, 20, 16, 32)
    placement = sharding.place(sharding.make_mesh(MeshConfig(data=4, fsdp=2)), {})

    def on_mesh(weights: Weights, x: Array, gate: layers.Gate) -> Array:
        def kernel(gate_up: Array, down: Array, x: Array) -> Array:
            assert x.shape[0] == rows
            return fused({"gate_up": gate_up, "down": down}, x, gate)

        return calling.by_rows(kernel, placement, num_weights=2)(weights["gate_up"], weights["down"], x)

    for ours, theirs in zip(
        with_gradients(on_mesh, gate, weights, x, given), with_gradients(plain, gate, weights, x, given), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * float(jnp.abs(theirs).max()))


@GATES
@pytest.mark.parametrize("config", ["trm/sudoku_mlp", "trm/sudoku_attention", "demo"])
@pytest.mark.parametrize(
    "mesh", [pytest.param("{devices: 1}", marks=pytest.mark.slow), "{devices: 8, data: 4, fsdp: 2}"]
)
def test_a_step_with_the_kernels_lowers_for_a_gpu(
    config: str, mesh: str, gate: layers.Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is around a kernel must leave nothing of it to the partitioner; lowering says so, and needs no GPU."""
    monkeypatch.setattr(sharding.Placement, "kernels", "hopper")
    small = ("data.path=nowhere", "data.expected.rows=100", "batch_size=16", "model.unroll=false")
    overrides = (*small, "model.dtype=bfloat16", f"mesh={mesh}", f"model.gate={gate}")
    experiment = build(configs.load(config, overrides, ExperimentConfig), planned=True)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = experiment.train_step.trace(*experiment.abstract_inputs).lower(lowering_platforms=("cuda",))
    kernels = 2 if config == "trm/sudoku_attention" else 3  # forward, backward, and that of the mixing weights
    # A cycle without gradients and the last one are programs of their own, and so is each of their two networks.
    assert lowered.as_text().count("xla.gpu.triton") >= 2 + kernels


def test_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(dtype: str = "bfloat16", positions: int = 97, mesh: MeshConfig | None = None) -> Array | None:
        weights, x, _ = example(8, positions, 16, 32)
        placement = ANYWHERE if mesh is None else sharding.place(sharding.make_mesh(mesh), {})
        arrays = weights["gate_up"], weights["down"], x.astype(dtype)
        return jax.eval_shape(lambda *arrays: token_mixing.fused(*arrays, 1e-5, placement), *arrays)

    assert choose() is None  # no GPU
    monkeypatch.setattr(sharding.Placement, "kernels", "hopper")
    assert choose() is not None
    assert choose("float32") is None
    assert choose(positions=129) is None
    assert choose(mesh=MeshConfig(data=4, tensor=2)) is None
