"""Meshes: what does not fit is refused before anything compiles, and how arrays are split does not change a result."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fixtures import tiny_config, write_4x4
from test_step import assert_near, run
from tinypod import experiment, sharding
from tinypod.errors import ConfigError
from tinypod.evaluate import Evaluator
from tinypod.sharding import MeshConfig

MIXING = {"mlp": "model.mixing={kind: mlp}", "attention": "model.mixing={kind: attention, num_heads: 4}"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("sharding") / "data")


def test_axes_take_what_is_left() -> None:
    assert MeshConfig().shape(8) == (8, 1, 1, 1)
    assert MeshConfig(fsdp=2, tensor=2).shape(8) == (2, 1, 2, 2)
    assert MeshConfig(data=2, pipeline=2, fsdp=-1).shape(8) == (2, 2, 2, 1)
    assert MeshConfig(slices=2, fsdp=4).shape(8) == (2, 1, 4, 1)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("{fsdp: 3}", r"mesh: data=-1 × pipeline=1 × fsdp=3 × tensor=1 does not divide the 8 devices"),
        ("{data: 4}", r"mesh: data=4 × pipeline=1 × fsdp=1 × tensor=1 makes 4 devices, but there are 8"),
        ("{data: -1, fsdp: -1}", r"mesh: only one axis can be -1"),
        ("{tensor: 0}", r"mesh: an axis has at least 1 device"),
        ("{tensor: -2}", r"mesh\.tensor"),
        ("{pipeline: 2}", r"mesh\.pipeline=2: a model of kind trm has no stages"),
        ("{tenor: 2}", r"mesh\.tenor.*tensor"),
        ("{slices: 2, fsdp: 8}", r"mesh\.slices=2: only `data` crosses slices, and data=1 is not a multiple of 2"),
        ("{slices: 3}", r"mesh\.slices=3: only `data` crosses slices, and data=8 is not a multiple of 3"),
        ("{slices: 0}", r"mesh\.slices"),
        ("{slices: 2, devices: 4}", r"mesh: `devices` takes the first ones, not some of each slice"),
        (
            "{tensor: 8}",
            r"mesh\.tensor=8 does not divide dimension 1 of layers\.attention\.out, which is \[2, 4, 4, 16\]",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(data: Path, mesh: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment.build(tiny_config(data, MIXING["attention"], f"mesh={mesh}"))


def test_a_batch_divides_over_the_axes_that_split_rows(data: Path) -> None:
    experiment.build(tiny_config(data, "batch_size=12", "mesh={data: 2, tensor: 4}")).check_batch()
    with pytest.raises(ConfigError, match=r"12 rows do not divide over 8 devices \(mesh: data=4 × fsdp=2\)"):
        experiment.build(tiny_config(data, "batch_size=12", "mesh={fsdp: 2}")).check_batch()


def test_every_parameter_has_a_rule_and_every_rule_a_parameter() -> None:
    mesh = sharding.make_mesh(MeshConfig())
    params = {"a": jnp.zeros((4, 2)), "b": {"c": jnp.zeros(3)}}
    specs = sharding.param_specs([("a", P("tensor")), (r"b\..*", P())], params, mesh)
    assert specs == {"a": P("tensor", None), "b": {"c": P(None)}}
    with pytest.raises(ConfigError, match=r"no sharding rule matches the parameter b\.c"):
        sharding.param_specs([("a", P())], params, mesh)
    with pytest.raises(ConfigError, match=r"rules that match no parameter: d"):
        sharding.param_specs([("a", P()), (r"b\..*", P()), ("d", P())], params, mesh)
    with pytest.raises(ConfigError, match=r"more dimensions than b\.c"):
        sharding.param_specs([("a", P()), (r"b\..*", P(None, "data"))], params, mesh)
    with pytest.raises(ConfigError, match=r"x\.mu \[5\] belongs to no parameter"):
        sharding.specs_like({"a": P(None)}, {"x": {"mu": jnp.zeros(5)}})


def test_tensor_and_fsdp_stay_inside_a_host() -> None:
    """Devices come in any order; two hosts of four end up as two rows of the data axis."""
    devices = [SimpleNamespace(process_index=i % 2, id=i) for i in (5, 0, 7, 2, 1, 6, 3, 4)]
    hosts = np.asarray([d.process_index for d in sorted(devices, key=lambda d: (d.process_index, d.id))])
    assert hosts.reshape(MeshConfig(fsdp=2, tensor=2).shape(8)).reshape(2, 4).tolist() == [[0] * 4, [1] * 4]
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2), list(reversed(jax.devices())))
    assert [d.id for d in mesh.devices.flat] == list(range(8))


@dataclass(frozen=True)
class Nameless:
    """A chip as JAX shows it."""

    id: int
    process_index: int = 0
    platform: str = "tpu"


@dataclass(frozen=True)
class Chip(Nameless):
    slice_index: int = 0


def tpus(*slices: int) -> list[Chip]:
    """By the slice that each is in."""
    return [Chip(number, slice_index=at) for number, at in enumerate(slices)]


def test_devices_are_ordered_slice_by_slice() -> None:
    mesh = sharding.make_mesh(MeshConfig(slices=2, fsdp=2), tpus(0, 1, 0, 1, 0, 1, 0, 1))
    assert [[d.slice_index for d in row.flat] for row in mesh.devices] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert [d.id for d in mesh.devices.flat] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_tpu_that_does_not_name_its_slice_is_of_the_only_one() -> None:
    """As the devices of the compiler's topologies with libtpu 0.0.51."""
    nameless = [Nameless(number) for number in range(4)]
    assert sharding.make_mesh(MeshConfig(), nameless).shape["data"] == 4
    assert sharding.num_slices(nameless) == 1
    with pytest.raises(ConfigError, match=r"mesh\.slices=2, but the devices are of 1 slice"):
        sharding.make_mesh(MeshConfig(slices=2), nameless)


@pytest.mark.parametrize(
    ("mesh", "slices", "message"),
    [
        (MeshConfig(), (0, 0, 1, 1), r"mesh\.slices=1, but the devices are of 2 slices; set mesh\.slices=2, so that"),
        (
            MeshConfig(slices=2),
            (0, 0, 0, 0),
            r"mesh\.slices=2, but the devices are of 1 slice; set mesh\.slices=1, or st",
        ),
        (MeshConfig(slices=2), (0, 0, 0, 1), r"mesh\.slices=2: the slices have 3, 1 devices; they must be of one size"),
    ],
)
def test_a_mesh_spans_the_slices_that_there_are(mesh: MeshConfig, slices: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharding.make_mesh(mesh, tpus(*slices))


def test_devices_of_one_slice_can_be_used_alone() -> None:
    """As `tinypod check` does with one of them."""
    assert sharding.make_mesh(MeshConfig(), tpus(0, 1)[1:]).size == 1


def test_devices_that_are_in_no_slice_are_taken_in_their_order() -> None:
    """A rehearsal on CPU devices is that of one slice, to the bit."""
    one, two = (sharding.make_mesh(MeshConfig(fsdp=2, slices=count)) for count in (1, 2))
    assert one == two


@pytest.mark.slow
def test_two_slices_give_what_one_gives(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other device is of another slice: the rows of a batch lie elsewhere, and their sum is the same."""
    settings = ("mesh={fsdp: 2}", "model.H_cycles=1", "model.num_layers=1", "model.L_cycles=1")
    one, one_sums = run(data, *settings, devices=8, steps=2)
    monkeypatch.setattr(sharding, "slice_of", lambda device: device.id % 2)
    two, two_sums = run(data, *settings, "mesh.slices=2", devices=8, steps=2)
    assert [d.id for d in two.params["head"].sharding.mesh.devices.flat] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert_near(two, one, 2e-4)
    assert [float(s["loss"]) for s in two_sums] == pytest.approx([float(s["loss"]) for s in one_sums], rel=1e-5)


@pytest.mark.parametrize("mixing", ["mlp", pytest.param("attention", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mesh",
    [
        "{data: 2, fsdp: 2, tensor: 2}",
        pytest.param("{data: 1, fsdp: 8}", marks=pytest.mark.slow),
        pytest.param("{data: 2, tensor: 4}", marks=pytest.mark.slow),
    ],
)
def test_any_mesh_gives_what_one_device_gives(data: Path, mixing: str, mesh: str) -> None:
    one, one_sums = run(data, MIXING[mixing])
    many, many_sums = run(data, MIXING[mixing], f"mesh={mesh}", devices=8)
    assert_near(many, one, 2e-4)
    assert [float(s["loss"]) for s in many_sums] == pytest.approx([float(s["loss"]) for s in one_sums], rel=1e-5)
    assert np.array_equal(one.carry["example"]["inputs"], many.carry["example"]["inputs"])


def test_fsdp_and_tensor_split_weights_moments_and_averages(data: Path) -> None:
    state, _ = run(data, "mesh={data: 2, fsdp: 2, tensor: 2}", devices=8, steps=1)
    for tree in (state.params, state.opt_state[1].mu, state.opt_state[1].nu, state.ema):
        for path in (("mlp", "gate_up"), ("mlp", "down"), ("token_mlp", "gate_up"), ("token_mlp", "down")):
            weight = tree["layers"][path[0]][path[1]]
            assert weight.addressable_shards[0].data.size * 4 == weight.size, path
        assert tree["head"].addressable_shards[0].data.size * 2 == tree["head"].size
    assert state.carry["z"].H.addressable_shards[0].data.shape[0] * 4 == 16


def test_fsdp_makes_one_layer_whole_at_a_time(data: Path) -> None:
    """The weights of all layers are never gathered at once, and gradients are split as soon as they are there."""
    built = experiment.build(tiny_config(data, "mesh={data: 1, fsdp: 8}", "model.num_layers=5", "model.H_cycles=1"))
    text = built.train_step.lower(*built.abstract_inputs).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line or " all-gather-start(" in line]
    whole_layers = [line for line in gathers if "f32[5,16,2,48]" in line or "f32[5,48,16]" in line]
    assert gathers
    assert not whole_layers


def test_fsdp_sends_weights_in_the_dtype_of_the_activations(data: Path) -> None:
    """And adds gradients up in float32. Read before compiling: a CPU would do it all in float32."""
    built = experiment.build(tiny_config(data, "mesh={data: 1, fsdp: 8}", "model.dtype=bfloat16"))
    text = built.train_step.lower(*built.abstract_inputs).as_text()
    placed = [line for line in text.splitlines() if "sharding_constraint" in line and "16x2x48x" in line]
    whole = [line for line in placed if "fsdp" not in line]
    assert whole
    assert all("bf16" in line for line in whole), whole
    assert any("f32" in line for line in placed if line not in whole), placed


def test_a_data_mesh_moves_no_weights(data: Path) -> None:
    built = experiment.build(tiny_config(data, MIXING["attention"]))
    text = built.train_step.lower(*built.abstract_inputs).compile().as_text()
    assert " all-reduce(" in text
    gathered = [line.split("=")[1].split()[0] for line in text.splitlines() if " all-gather(" in line]
    # Only ids and gradients of the rows of the puzzle table are put together.
    assert all(shape.startswith(("s32[16", "f32[16,8]", "u32[16")) for shape in gathered), gathered


def test_evaluation_is_the_same_on_any_mesh(data: Path) -> None:
    scores = []
    for mesh in ("{data: 8}", "{data: 2, fsdp: 2, tensor: 2}"):
        built = experiment.build(tiny_config(data, f"mesh={mesh}"))
        scores.append(Evaluator(built.task.open_evaluation(None), built.mesh, built.specs, 8)(built.init().params))
    assert scores[0] == pytest.approx(scores[1])
    assert scores[0]["count"] == 21


@pytest.mark.parametrize("platform", ["cuda", "tpu", "nonsense"])
def test_a_platform_that_is_not_there_is_an_error_that_says_what_to_do(platform: str) -> None:
    program = "from tinypod import sharding; sharding.all_devices()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""},  # also on a machine with a GPU
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"DeviceError: no device of the platform that was asked for (JAX_PLATFORMS={platform})" in done.stderr
    assert "JAX_PLATFORMS=cpu" in done.stderr
