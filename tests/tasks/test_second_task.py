"""The proof that a task is one file: `toy_task.py` goes through every command by its config alone."""

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from fixtures import Steps
from test_training import assert_same_states, rows, state_at
from tinypod import cli, config, training
from tinypod.check.runner import run_checks
from tinypod.experiment import ExperimentConfig, build
from tinypod.runs.folder import Run
from tinypod.runs.load import load_weights
from tpu import needs_compiler

CONFIG = {
    "steps": 40,
    "batch_size": 16,
    "ema_decay": 0.9,
    "task": {"kind": "next_byte"},
    "data": {"kind": "text", "path": "text.txt"},
    "model": {"kind": "two_layers", "width": 16},
    "optimizer": {"kind": "adamw", "learning_rate": 1e-2, "schedule": {"kind": "constant", "warmup_steps": 4}},
    "eval": {"every_steps": 20, "batch_size": 8},
    "checkpoint": {"every_steps": 20},
    "log": {"every_steps": 10, "tensorboard": False},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file, and the text beside it."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "text.txt").write_text("she sells sea shells by the sea shore. ")
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"data": {"kind": "text", "path": str(folder / "text.txt")}}))
    return path


def load(toy: Path, *overrides: str) -> ExperimentConfig:
    return config.load(toy, overrides, ExperimentConfig)


def quiet() -> Console:
    return Console(file=StringIO(), width=200)


@pytest.fixture(scope="module")
def trained(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run, console = tmp_path_factory.mktemp("trained") / "run", quiet()
    training.train(load(toy), Run(run), console)
    return run, console.file.getvalue()


def test_it_trains_evaluates_and_reports(trained: tuple[Path, str]) -> None:
    run, shown = trained
    assert "39 training and 21 held-out blocks; batch 16 on 8" in shown
    assert "held-out" in shown
    scores = [row for row in rows(run) if "eval/loss" in row]
    assert [row["step"] for row in scores] == [20, 40]
    assert scores[1]["eval/loss"] < scores[0]["eval/loss"] < 5
    assert scores[1]["eval/count"] == 21
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    # A lower loss is better: the best checkpoint is the last.
    assert load_weights(Run(run), [], "best").step == 40


def test_a_frozen_leaf_inside_a_trained_group_stays(toy: Path, trained: tuple[Path, str]) -> None:
    first, last = jax.device_get(build(load(toy)).init().params), state_at(toy, trained[0], 40)
    assert np.array_equal(first["layers"]["scale"], last["params.layers.scale"])
    assert not np.array_equal(first["layers"]["weight"], last["params.layers.weight"])
    assert "ema.layers.weight" in last
    assert not [name for name in last if name.endswith("layers.scale") and name != "params.layers.scale"]


def test_eval_through_the_command_line(trained: tuple[Path, str]) -> None:
    done = CliRunner().invoke(cli.app, ["eval", str(trained[0]), "--json"])
    assert done.exit_code == 0, done.exception
    scores = json.loads(done.stdout)
    last = [row for row in rows(trained[0]) if "eval/loss" in row][-1]
    assert scores["loss"] == pytest.approx(last["eval/loss"])
    table = CliRunner().invoke(cli.app, ["eval", str(trained[0])]).stdout
    assert "blocks" in table
    assert "right" in table


def test_two_halves_are_the_whole_to_the_bit(toy: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    training.train(load(toy, "steps=20"), Run(tmp_path / "run"), quiet())
    training.train(load(toy), Run(tmp_path / "run"), quiet())
    assert_same_states(state_at(toy, trained[0], 40), state_at(toy, tmp_path / "run", 40))


@pytest.mark.parametrize("mesh", ["mesh.data=8", "mesh={data: 2, fsdp: 2, tensor: 2}"])
def test_eight_devices_are_one(toy: Path, mesh: str) -> None:
    states = []
    for overrides, devices in (([], 1), ([mesh], 8)):
        built = build(load(toy, *overrides), jax.devices()[:devices])
        state, take = built.init(), Steps(built)
        for _ in range(6):
            state, sums = take(state)
        assert float(sums["weight"]) < 16 * 8  # masked tokens do not count
        states.append(state)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(states[0]), jax.tree.leaves(states[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=jax.tree_util.keystr(path))


def test_accumulation_weighs_tokens_not_parts(toy: Path) -> None:
    """Parts with few unmasked tokens count for as much as they have."""
    whole, parts = (build(load(toy, f"accumulation={n}"), jax.devices()[:1]) for n in (1, 4))
    a, b = (Steps(built)(built.init())[0] for built in (whole, parts))
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_check_passes(toy: Path, tmp_path: Path) -> None:
    console = quiet()
    results = run_checks(load(toy), console, steps=5, scratch=str(tmp_path))
    assert {result.status for result in results} == {"pass"}, console.file.getvalue()


def test_a_rolled_back_run_reads_other_batches(toy: Path) -> None:
    """The feed is asked by number, ahead of the step and again after a rollback."""
    built = build(load(toy), jax.devices()[:1])
    feed = built.task.open_feed(built.mesh)
    asked = {number: np.asarray(feed(number)["tokens"]) for number in (0, 1, 2, 7, 1, 2)}
    assert len({x.tobytes() for x in asked.values()}) == 4
    again = built.task.open_feed(built.mesh)
    assert all(np.array_equal(again(number)["tokens"], x) for number, x in asked.items())


def test_its_sections_belong_together(toy: Path) -> None:
    with pytest.raises(config.ConfigError, match=r"task\.kind=next_byte goes with data\.kind=text, not puzzles"):
        load(toy, "data={kind: puzzles, path: x}")


def plan(toy: Path, *arguments: str) -> dict:
    command = [sys.executable, "-m", "tinypod", "plan", str(toy), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, env=os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_plan_for_the_device_at_hand(toy: Path) -> None:
    (found,) = plan(toy, "--slice", "local")["plans"]
    assert found["fits"]
    assert found["analysis"]["memory"]["weights"] > 0


@needs_compiler
def test_plan_for_a_slice(toy: Path) -> None:
    (found,) = plan(toy, "--slice", "v6e-4")["plans"]
    assert found["fits"]
    assert found["devices"] == 4
    assert found["prediction"]["step_s"] > 0
