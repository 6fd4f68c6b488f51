"""A trained run on another machine: without its dataset, on other devices, in another precision; its weights alone are
read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fixtures import tiny_config, write_4x4
from tinypod import cli, sharding, training
from tinypod.errors import ConfigError, DataError, UserError
from tinypod.evaluate import Evaluator
from tinypod.runs import orbax_manager
from tinypod.runs.description import read_description
from tinypod.runs.folder import Run
from tinypod.runs.load import Loaded, check_overrides, load_weights
from tinypod.solve import refine

PUZZLE = "12..34.........."


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On 8 devices: data 4 × fsdp 2."""
    folder = tmp_path_factory.mktemp("load")
    data = write_4x4(folder / "data")
    training.train(tiny_config(data, "steps=5", "mesh.fsdp=2"), Run(folder / "run"), Console(quiet=True))
    return folder / "run"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The run alone, of which nothing says where the dataset is but a path that is not there."""
    run = shutil.copytree(trained, tmp_path / "copied")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(trained.parent / "data"), "/not/here"))
    return run


def scores(loaded: Loaded) -> dict[str, float]:
    task, mesh, specs = loaded.experiment.task, loaded.experiment.mesh, loaded.experiment.specs
    return Evaluator(task.open_evaluation(None), mesh, specs, 8)(loaded.params)


def solved(run: Path, *arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["solve", str(run), *arguments])
    assert result.exit_code == 0, result.exception
    return result.output


def test_a_given_puzzle_needs_no_dataset(trained: Path, copied: Path) -> None:
    loaded = [load_weights(Run(run), [], "latest", needs_data=False) for run in (trained, copied)]
    there, here = (refine.refinements(one.experiment, one.params, PUZZLE, None)[0] for one in loaded)
    np.testing.assert_array_equal(here.grids, there.grids)
    assert "step 3" in solved(copied, PUZZLE)
    assert "step 2" in solved(copied, PUZZLE, "model.dtype=bfloat16", "--halt-steps", "2")


def test_a_held_out_puzzle_does_and_the_error_says_what_else_to_do(trained: Path, copied: Path) -> None:
    result = CliRunner().invoke(cli.app, ["solve", str(copied)])
    assert isinstance(result.exception, DataError)
    for advice in ("no dataset at /not/here", "set data.path=FOLDER", f"`tinypod solve {copied} PUZZLE`"):
        assert advice in str(result.exception)
    assert "step 1" in solved(copied, f"data.path={trained.parent / 'data'}")
    with pytest.raises(DataError, match="no dataset at"):
        load_weights(Run(copied), [], "latest")


def test_a_run_without_its_description_needs_its_dataset(trained: Path, copied: Path) -> None:
    """Of an older version: resuming writes it."""
    (copied / "task.json").unlink()
    with pytest.raises(DataError, match="no dataset at"):
        load_weights(Run(copied), [], "latest", needs_data=False)
    (copied / "task.json").write_text("{")
    with pytest.raises(UserError, match=r"task\.json: not what a run says about itself"):
        load_weights(Run(copied), [], "latest", needs_data=False)
    described = read_description(Run(trained))
    assert [metric.name for metric in described.headline][:2] == ["exact_accuracy", "cell_accuracy"]
    assert described.num_weights == load_weights(Run(trained), [], "latest").experiment.num_weights


def test_weights_are_all_that_is_read(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    original = orbax_manager.read_leaves

    def noted(manager, step, wanted):
        read.update(name.split(".")[0] for name in wanted)
        return original(manager, step, wanted)

    monkeypatch.setattr(orbax_manager, "read_leaves", noted)
    load_weights(Run(trained), [], "latest", "live")
    assert read == {"params", "checksums"}
    load_weights(Run(trained), [], "latest", "ema")
    assert read == {"params", "ema", "checksums"}


@pytest.mark.parametrize("mesh", [["mesh.devices=1"], ["mesh.devices=3"], ["mesh.fsdp=4"], ["mesh={data: 8}"]])
def test_any_mesh_will_do(trained: Path, mesh: list[str]) -> None:
    """Also one that goes with a part of the run's own only: fsdp 2 gives way where there is one device."""
    plain, other = load_weights(Run(trained), [], "latest"), load_weights(Run(trained), mesh, "latest")
    assert plain.experiment.mesh.size == 8
    assert other.experiment.mesh.shape != plain.experiment.mesh.shape
    for a, b in zip(jax.tree.leaves(other.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert scores(other) == pytest.approx(scores(plain))


def test_weights_go_to_as_many_slices_as_there_are(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one slice is used on two."""
    monkeypatch.setattr(sharding, "slice_of", lambda device: device.id % 2)
    loaded = load_weights(Run(trained), [], "latest")
    assert loaded.experiment.config.mesh.slices == 2
    assert [device.id for device in loaded.experiment.mesh.devices.flat] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_mesh_that_is_asked_for_and_cannot_be_is_an_error(trained: Path) -> None:
    with pytest.raises(ConfigError, match="fsdp=3"):
        load_weights(Run(trained), ["mesh.fsdp=3"], "latest")


def test_another_precision_takes_the_same_weights(trained: Path) -> None:
    plain = load_weights(Run(trained), [], "latest")
    other = load_weights(Run(trained), ["model.dtype=bfloat16"], "latest")
    assert other.experiment.config.model.dtype == "bfloat16"
    for a, b in zip(jax.tree.leaves(other.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert scores(other)["count"] == 21


def test_a_run_of_eight_devices_on_a_machine_with_one(trained: Path) -> None:
    environment = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}
    command = [sys.executable, "-m", "tinypod", "eval", str(trained), "--json", "--checkpoint", "latest"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    expected = scores(load_weights(Run(trained), [], "latest"))
    assert {name: told[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    "key", ["steps", "model.hidden_size", "optimizer.learning_rate", "eval.limit", "task.q_loss_weight", "mesh_x"]
)
def test_keys_of_the_training_are_refused(trained: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: a trained model is used as it is.*model.dtype"):
        check_overrides([f"{key}=1"])
    for command in ("eval", "solve"):
        result = CliRunner().invoke(cli.app, [command, str(trained), f"{key}=1"])
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).startswith(f"{key}: ")


def test_keys_that_make_sense_are_taken() -> None:
    check_overrides(["model.dtype=float32", "data.path=x", "data.text=x", "mesh={data: 1}", "mesh.fsdp=2"])
    check_overrides(["eval.batch_size=4", "eval.weights=live", "task.halting.max_steps=64", "model.L_cycles=9"])
