"""Pre-flight: it passes where all is well, and each check fails when what it looks at is broken."""

import copy
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fixtures import CONFIGS, TINY, tiny_config, write_4x4
from tinypod import cli
from tinypod.check import checks
from tinypod.check import runner as check
from tinypod.check.probe import Failed, Found, Probe, Skipped
from tinypod.check.runner import CHECKS
from tinypod.cluster.agreement import Cluster
from tinypod.errors import UserError
from tinypod.experiment import Experiment, build
from tinypod.runs.checkpoints import Checkpoints

CONFIG = CONFIGS / "trm" / "sudoku_mlp.yaml"
SMALL = ("model.num_layers=1", "model.H_cycles=1")  # most of a check is compiling


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("check") / "data")


@pytest.fixture(scope="module")
def stepped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """A probe on 8 devices after the vital checks; tests change copies of it."""
    probe = Probe(tiny_config(data, *SMALL), scratch=str(tmp_path_factory.mktemp("scratch") / "own"))
    checks.check_data(probe)
    checks.check_step(probe)
    return probe


@pytest.fixture
def probe(stepped: Probe, tmp_path: Path) -> Probe:
    changed = copy.copy(stepped)
    changed.state, changed.scratch = jax.tree.map(jnp.copy, stepped.state), str(tmp_path / "scratch")
    return changed


def row(name: str, probe: Probe) -> check.Result:
    return check.run_check(next(c for c in CHECKS if c.name == name), probe)


def checked(config: Any, **options: Any) -> tuple[dict[str, check.Result], str]:
    console = Console(file=StringIO(), width=100)
    results = check.run_checks(config, console, title="tiny.yaml", **options)
    return {result.check: result for result in results}, console.file.getvalue()


def test_all_is_well_on_eight_devices(data: Path, stepped: Probe, tmp_path: Path) -> None:
    results, shown = checked(tiny_config(data, *SMALL), steps=5, scratch=str(tmp_path))
    assert {name: result.status for name, result in results.items()} == {c.name: "pass" for c in CHECKS}, shown
    assert "tiny.yaml on 8 × cpu" in shown
    assert "9 checks passed" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert list(tmp_path.iterdir()) == []
    assert results["config and data"].figures == {"train_rows": 40, "held_out_rows": 21, "rows_per_device": 2}
    assert results["rows"].figures["rows"] == 16
    assert results["learning"].figures["fall"] > 0.01
    assert {"steps_per_s", "examples_per_s", "compile_s", "step_bytes"} <= results["speed"].figures.keys()


def test_a_damaged_dataset_fails_the_first_check_and_the_rest_is_skipped(tmp_path: Path) -> None:
    folder = write_4x4(tmp_path / "data")
    (folder / "train.npz").write_bytes((folder / "train.npz").read_bytes() + b"x")
    results, shown = checked(tiny_config(folder))
    assert results["config and data"].status == "FAIL"
    assert "train.npz" in results["config and data"].found
    assert {results[c.name].status for c in CHECKS[1:]} == {"skipped"}
    assert "1 of 9 checks failed: config and data" in shown


@pytest.mark.parametrize(
    ("override", "message"),
    [("batch_size=12", "12 rows do not divide over 8 devices"), ("mesh.tensor=3", "does not divide the 8 devices")],
)
def test_what_does_not_fit_the_mesh_is_a_row_of_the_table(data: Path, override: str, message: str) -> None:
    result = row("config and data", Probe(tiny_config(data, override)))
    assert (result.status, message in result.found) == ("FAIL", True)


def with_draw(probe: Probe, change: Callable[[Any], Any]) -> None:
    """Only on the mesh: what is drawn on one device stays right."""
    task = probe.experiment.task
    changed = dataclasses.replace(task, draw=lambda *inputs: change(task.draw(*inputs)))
    probe.experiment = dataclasses.replace(probe.experiment, task=changed)


def test_a_wrong_row_is_found(probe: Probe) -> None:
    with_draw(probe, lambda batch: batch | {"min_steps": batch["min_steps"].at[5].add(1)})
    result = row("rows", probe)
    assert (result.status, result.found) == ("FAIL", "not as in the batch made on one device: row 5 of 16")


def test_a_batch_that_depends_on_the_devices_is_found(probe: Probe) -> None:
    with_draw(probe, lambda batch: jax.tree.map(lambda x: jnp.roll(x, jax.device_count(), axis=0), batch))
    result = row("rows", probe)
    assert result.status == "FAIL"
    assert "rows 0, 1, 2, 3 and 12 more of 16" in result.found


def test_rows_that_two_processes_draw_are_found(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "gather", lambda self, values: np.stack([values, values]))
    with pytest.raises(Failed, match="drawn 2 times instead of once: rows 0, 1, 2, 3 and 12 more of 16"):
        checks.check_rows(probe)


def test_copies_of_rows_over_tensor_devices_agree(data: Path) -> None:
    probe = Probe(tiny_config(data, *SMALL, "mesh={data: 2, fsdp: 2, tensor: 2}"))
    checks.check_data(probe)
    assert checks.check_rows(probe).text.startswith("4 groups of devices hold 16 rows, each once")


def corrupted(array: jax.Array) -> jax.Array:
    """The same but for one bit of device 3's copy."""
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[3].view(np.uint32).reshape(-1)[0] ^= 1
    devices = [shard.device for shard in array.addressable_shards]
    placed = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


def test_a_corrupted_replica_is_found(probe: Probe) -> None:
    params = probe.state.params
    probe.state = probe.state._replace(params=params | {"head": corrupted(params["head"])})
    result = row("replicas", probe)
    assert result.status == "FAIL"
    assert "params.head" in result.found


def test_gradients_that_differ_between_devices_are_found(probe: Probe) -> None:
    """Only in the first moment: as if one device had left its gradient out of the sum."""
    compiled = probe.compiled

    def step_apart(*inputs: Any) -> Any:
        state, sums = compiled(*inputs)
        clip, adam, *rest = state.opt_state
        adam = adam._replace(mu=adam.mu | {"head": corrupted(adam.mu["head"])})
        return state._replace(opt_state=(clip, adam, *rest)), sums

    probe.compiled = step_apart
    result = row("replicas", probe)
    assert result.status == "FAIL"
    assert "opt_state.1.mu.head" in result.found


class Altered:
    """A train step on the mesh whose sums come out changed."""

    def __init__(self, probe: Probe, **changes: Callable[[Any], Any]) -> None:
        self.compiled, self.changes = probe.compiled, changes

    def lower(self, *_: Any) -> "Altered":
        return self

    def compile(self) -> Any:
        return self

    def __call__(self, *inputs: Any) -> Any:
        state, sums = self.compiled(*inputs)
        return state, sums | {name: change(sums[name]) for name, change in self.changes.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"loss": lambda x: 1.001 * x}, "on one device, "), ({"grad_norm": lambda x: 8 * x}, "the first gradient's norm")],
)
def test_another_loss_or_gradient_on_all_devices_is_found(probe: Probe, changes: Any, message: str) -> None:
    probe.experiment = dataclasses.replace(probe.experiment, train_step=Altered(probe, **changes))
    assert row("step", probe).status == "pass"
    result = row("1 device = all", probe)
    assert (result.status, message in result.found) == ("FAIL", True)


def test_a_batch_too_large_for_one_device_is_no_failure(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(Experiment, "compile_step", full)
    result = row("1 device = all", probe)
    assert (result.status, "does not fit one device" in result.found) == ("skipped", True)
    result = row("step", probe)
    assert (result.status, "lower batch_size=" in result.found) == ("FAIL", True)


def test_steps_that_are_not_finite_are_found(probe: Probe) -> None:
    probe.experiment = dataclasses.replace(probe.experiment, train_step=Altered(probe, skipped=jnp.ones_like))
    result = row("step", probe)
    assert (result.status, "not finite at step 1" in result.found) == ("FAIL", True)


def test_a_checkpoint_changed_on_disk_is_found(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    restore, damaged = Checkpoints.restore, []

    def after_damage(self: Checkpoints, number: int, abstract: Any) -> Any:
        for path in Path(self.folder).rglob("d/*"):  # where the arrays are
            content = bytearray(path.read_bytes())
            content[len(content) // 2 :: 64] = bytes(byte ^ 0xFF for byte in content[len(content) // 2 :: 64])
            path.write_bytes(content)
            damaged.append(path)
        return restore(self, number, abstract)

    monkeypatch.setattr(Checkpoints, "restore", after_damage)
    result = row("checkpoint", probe)
    assert damaged
    assert (result.status, "is damaged" in result.found) == ("FAIL", True), result.found


def test_a_checkpoint_that_restores_something_else_is_found(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = Checkpoints.restore

    def almost(self: Checkpoints, number: int, abstract: Any) -> Any:
        state = restore(self, number, abstract)
        return state._replace(params=state.params | {"head": corrupted(state.params["head"])})

    monkeypatch.setattr(Checkpoints, "restore", almost)
    result = row("checkpoint", probe)
    assert (result.status, "params.head (1 of " in result.found) == ("FAIL", True)


def test_a_folder_that_others_cannot_see_asks_for_another(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "gather", lambda self, values: np.stack([values, np.zeros_like(values)]))
    with pytest.raises(Failed, match=r"process 1 of 1 cannot see .*--scratch"):
        checks.check_checkpoint(probe)


def on_one_device(data: Path, *overrides: str) -> Probe:
    probe = Probe(tiny_config(data, *SMALL, *overrides), steps=3)
    checks.check_data(probe)
    probe.experiment = build(probe.experiment.config, jax.devices()[:1])
    probe.feed = probe.experiment.task.open_feed(probe.experiment.mesh)
    probe.compiled = probe.experiment.compile_step(probe.feed(0))
    return probe


def test_a_rate_of_zero_does_not_learn(data: Path) -> None:
    rates = ("optimizer.learning_rate=0", "optimizer.tables.learning_rate=0")
    result = row("learning", on_one_device(data, *rates))
    assert result.status == "FAIL"
    assert "0.0% less, in 3 steps" in result.found
    assert "at least 1% less was expected" in result.found


def test_one_device_alone_has_nothing_to_compare(data: Path) -> None:
    probe = on_one_device(data)
    for function in (checks.check_rows, checks.check_replicas, checks.check_one_device):
        with pytest.raises(Skipped, match="one device"):
            function(probe)


def test_compiling_in_the_loop_is_found(probe: Probe) -> None:
    compiled = probe.compiled

    def compiling_step(state: Any, *inputs: Any) -> Any:
        jax.jit(lambda x: x + 1)(state.step)
        return compiled(state, *inputs)

    probe.compiled = compiling_step
    result = row("one trace", probe)
    assert (result.status, "was compiled" in result.found) == ("FAIL", True)


def test_a_replica_check_that_compiles_in_the_loop_is_found(data: Path, probe: Probe) -> None:
    """Its first call is with initial weights; if a step changes their types, the next one compiles."""
    init = probe.experiment.init_state

    def of_other_types(settings: Any) -> Any:
        state = init(settings)
        return state._replace(params=state.params | {"head": state.params["head"].astype(jnp.bfloat16)})

    config = tiny_config(data, *SMALL, "health.replica_check_every_steps=2")
    probe.experiment = dataclasses.replace(probe.experiment, config=config, init_state=of_other_types)
    result = row("one trace", probe)
    assert (result.status, "was compiled" in result.found) == ("FAIL", True)


def test_a_state_whose_types_change_is_found(probe: Probe) -> None:
    compiled = probe.compiled

    def drifting_step(*inputs: Any) -> Any:
        state, sums = compiled(*inputs)
        return state._replace(step=state.step.astype(jnp.float32)), sums

    probe.compiled = drifting_step
    result = row("one trace", probe)
    assert (result.status, "changes the types of its state" in result.found) == ("FAIL", True)


def of_two(answers: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> check.Result:
    """What a check comes to when two processes give these answers."""
    monkeypatch.setattr(check, "_gather_json", lambda probe, mine: answers)
    made = Probe(UserError("unused"), Cluster(0, 2))
    return check.run_check(check.Check("any", lambda probe: Found("fine here")), made)


def test_a_failure_of_one_process_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, bad = {"status": "pass", "text": "fine", "same": {}}, {"status": "FAIL", "text": "no data", "same": {}}
    result = of_two([fine, bad], monkeypatch)
    assert (result.status, result.found) == ("FAIL", "process 1: no data")
    assert of_two([bad, bad], monkeypatch).found == "no data"
    assert of_two([fine, fine], monkeypatch).status == "pass"


def test_processes_with_other_data_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"status": "pass", "text": "", "same": {"the config": "a", "the dataset": x}} for x in "bc"]
    result = of_two(answers, monkeypatch)
    assert (result.status, result.found[:48]) == ("FAIL", "process 1 differs from process 0 in the dataset;")


def test_a_config_that_does_not_load_is_a_table_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    output = StringIO()
    module = importlib.import_module("tinypod.cli.check")  # `cli.check` is the command
    monkeypatch.setattr(module, "console", Console(file=output, width=100))
    done = CliRunner().invoke(cli.app, ["check", str(CONFIG), "nonsense=1", "--processes", "2"])
    assert done.exit_code == 1
    assert "config and data  FAIL" in output.getvalue()
    assert "nonsense: unknown key" in output.getvalue()


def rehearse(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in two processes, with a temporary folder of its own."""
    command = [sys.executable, "-m", "tinypod", "check", str(CONFIG), *TINY, *SMALL, *arguments]
    environment = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "100"}
    return subprocess.run(
        [*command, "--processes", "2", "--devices-per-process", "2"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )


@pytest.mark.slow
def test_two_processes_check_together(data: Path, tmp_path: Path) -> None:
    done = rehearse(tmp_path, f"data.path={data}", "--steps", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[0] config and data  pass") == 1
    assert "2 processes hold 16 rows, each once" in done.stdout
    assert "[0] 9 checks passed" in done.stdout
    assert "[1]" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_two_processes_fail_together_and_print_only_json(tmp_path: Path) -> None:
    done = rehearse(tmp_path, f"data.path={tmp_path / 'nowhere'}", "--json")
    assert done.returncode == 1, done.stderr
    results = json.loads(done.stdout)
    assert [result["status"] for result in results] == ["FAIL"] + ["skipped"] * 8
    assert "no dataset at" in results[0]["found"]
    assert [path.name for folder in tmp_path.iterdir() for path in folder.iterdir()] == ["logs"]
