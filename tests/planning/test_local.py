"""Plans for the devices at hand: the prediction's arithmetic, and that measuring runs steps."""

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fixtures import CONFIGS, TINY, tiny_config, write_4x4
from tinypod import cli, experiment
from tinypod.planning import analysis, tables
from tinypod.planning import local as local_device
from tinypod.planning.planner import Probe


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("local") / "data")


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_the_prediction_is_the_roofline_of_the_kernels(data: Path) -> None:
    built = experiment.build(tiny_config(data))
    found, _ = analysis.analyse(built)
    assert found.work is not None
    probe = Probe(flops=5e7, bandwidth=1e8, memory_bytes=1)
    made = local_device.make_local_plan(built, found, probe)
    each = [k.runs * max(k.flops / 5e7, k.hbm_bytes / 1e8) for k in found.work.kernels]
    parts = made.prediction
    assert parts.step_s == pytest.approx(sum(each))
    assert max(parts.compute_s, parts.hbm_s) < parts.step_s < parts.compute_s + parts.hbm_s
    assert not made.fits
    assert made.rows_per_device == 2
    roomy = local_device.make_local_plan(built, found, probe.model_copy(update={"memory_bytes": 2**40}))
    assert roomy.fits
    silent = local_device.make_local_plan(built, found, probe.model_copy(update={"memory_bytes": None}))
    assert silent.fits


@pytest.mark.slow
def test_where_it_does_not_fit_a_cut_is_found(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with room for two thirds of what eight rows need."""
    config = tiny_config(data, "batch_size=64")
    needed = local_device.plan_here(config, quiet(), measure=False).analysis.memory
    room = needed.state + int(0.66 * (needed.needed - needed.state))
    monkeypatch.setattr(local_device, "device_bytes", lambda: room)
    failed = local_device.plan_here(config, quiet(), measure=True)
    assert not failed.fits
    assert failed.measured_s is None
    found = local_device.find_fit_here(config, failed, quiet(), measure=True)
    assert found is not None
    assert found.fits
    assert found.overrides
    assert found.measured_s is not None


def without_memory(experiment):
    """A compiler that runs out of memory with more than two rows a device, and does not say what it needs."""
    if experiment.config.batch_size // experiment.config.accumulation > 2 * experiment.mesh.size:
        message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 30.5GiB."
        lower = SimpleNamespace(compile=lambda: raise_(jax.errors.JaxRuntimeError(message)))
        experiment = dataclasses.replace(experiment, train_step=SimpleNamespace(lower=lambda *arguments: lower))
    return analysis.analyse(experiment)


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.slow
def test_a_variant_is_suggested_where_the_compiler_ran_out(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_device, "analyse", without_memory)
    config = tiny_config(data, "batch_size=64", "model.remat=true")
    assert local_device.suggest(config) == "accumulation=4"
    failed = local_device.plan_here(config, quiet(), measure=False)
    memory = failed.analysis.memory
    assert not failed.fits
    assert memory.needed == sum(memory.parts().values())
    assert memory.temporaries == 0  # not known
    assert "needs at least" in tables.too_large(failed, searched=True)


@pytest.mark.slow
def test_a_variant_is_suggested_where_the_numbers_say_it_fits(data: Path) -> None:
    """It ran out all the same: what is suggested needs less."""
    config = tiny_config(data, "batch_size=64")
    found = local_device.suggest(config)
    assert found
    before, after = (
        local_device.plan_here(config, quiet(), measure=False, overrides=overrides).analysis.memory.needed
        for overrides in ((), tuple(found.split()))
    )
    assert after < 0.9 * before


def test_a_suggestion_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert local_device.suggest(tiny_config(tmp_path / "nothing", "data.expected=null")) is None
    assert "looking for a variant that fits failed" in caplog.text


def test_the_probe_is_a_speed() -> None:
    probe = local_device.probe_device("float32")
    assert 1e6 < probe.flops < 1e15
    assert 1e6 < probe.bandwidth < 1e14
    assert probe.memory_bytes is None or probe.memory_bytes > 2**20


def test_measuring_runs_steps(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    original = local_device.analyse

    def counting(built):
        found, compiled = original(built)

        def step(state, *inputs):
            state, sums = compiled(state, *inputs)
            steps.append(int(state.step))
            return state, sums

        return found, step

    monkeypatch.setattr(local_device, "analyse", counting)
    made = local_device.plan_here(tiny_config(data), quiet(), measure=True)
    assert steps == list(range(1, 13))
    assert made.measured_s is not None
    assert made.ratio == pytest.approx(made.prediction.step_s / made.measured_s)


@pytest.mark.slow
def test_the_command_plans_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    overrides = [*TINY, f"data.path={tmp_path}/nothing", "data.expected={kind: sudoku, box: [2, 2], rows: 50}"]
    config = str(CONFIGS / "trm" / "sudoku_mlp.yaml")
    arguments = ["plan", config, "--slice", "local", "--measure", *overrides]
    shown = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert f"{jax.device_count()} × " in shown.stdout
    assert "predicted / measured" in shown.stdout
    [answer] = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).stdout)["plans"]
    assert answer["measured_s"] > 0
    assert answer["prediction"]["step_s"] > 0
