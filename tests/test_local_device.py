"""Plans for the devices at hand: the prediction's arithmetic, and that measuring runs steps."""

import io
import json
from pathlib import Path

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fixtures import TINY, tiny_config, write_4x4
from tinypod import analysis, cli, experiment, local_device


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("local") / "data")


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_the_prediction_adds_products_and_traffic(data: Path) -> None:
    built = experiment.build(tiny_config(data))
    found, _ = analysis.analyse(built)
    assert found.work is not None
    probe = local_device.Probe(device_kind="x", devices=8, flops=1e9, bandwidth=1e8, memory_bytes=1)
    made = local_device.make_local_plan(built, found, found.work, probe)
    assert made.predicted_s == pytest.approx(found.work.flops / 1e9 + found.work.hbm_bytes / 1e8)
    assert made.fits is False
    assert made.rows_per_device == 2
    roomy = probe.model_copy(update={"memory_bytes": 2**40, "bandwidth": 1e15})
    made = local_device.make_local_plan(built, found, found.work, roomy)
    assert (made.fits, made.bound) == (True, "compute")


def test_the_probe_is_a_speed() -> None:
    probe = local_device.probe_device("float32")
    assert probe.devices == 8
    assert 1e6 < probe.flops < 1e15
    assert 1e6 < probe.bandwidth < 1e14
    assert probe.memory_bytes is None or probe.memory_bytes > 2**20


def test_measuring_runs_steps(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    original = local_device.analyse

    def counting(built):
        found, compiled = original(built)

        def step(state, source):
            state, sums = compiled(state, source)
            steps.append(int(state.step))
            return state, sums

        return found, step

    monkeypatch.setattr(local_device, "analyse", counting)
    made = local_device.plan_here(tiny_config(data), quiet(), measure=True)
    assert steps == list(range(1, 13))
    assert made.measured_s is not None
    assert made.ratio == pytest.approx(made.predicted_s / made.measured_s)


def test_the_command_plans_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    overrides = [*TINY, f"data.path={tmp_path}/nothing", "data.expected={kind: sudoku, box: [2, 2], rows: 50}"]
    config = str(Path(__file__).parents[1] / "configs" / "trm" / "sudoku_mlp.yaml")
    arguments = ["plan", config, "--slice", "local", "--measure", *overrides]
    shown = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert f"{jax.device_count()} × " in shown.stdout
    assert "predicted / measured" in shown.stdout
    answer = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).stdout)
    assert answer["measured_s"] > 0
    assert answer["predicted_s"] > 0
