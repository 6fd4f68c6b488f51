"""Studies that run: packed runs equal those trained alone; stopped, killed, diverged and failed ones."""

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console

from fixtures import TINY, write_4x4
from tinypod import config as configs
from tinypod.errors import UserError
from tinypod.experiment import ExperimentConfig, build
from tinypod.runs.checksums import flatten
from tinypod.runs.folder import CHECKPOINTS, Run
from tinypod.runs.metrics import MetricsLog
from tinypod.runs.saver import open_checkpoints
from tinypod.study import run as study_run
from tinypod.study.file import Study, load_study
from tinypod.study.folder import Outcome, read_outcome, run_of, write_outcome
from tinypod.study.packing import most_devices
from tinypod.study.run import plan_packs, run_study
from tinypod.study.status import table
from tinypod.training import train

LIMIT_S = 900  # for a process that must end: these cores may be busy


def quiet() -> Console:
    return Console(file=StringIO(), width=100)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("study") / "data")


def write(folder: Path, data: Path, **tree: Any) -> Path:
    """A study of the tiny model."""
    overrides = [configs.parse_override(text) for text in (*TINY, f"data.path={data}")]
    base = configs.read_tree(configs.locate("trm/sudoku_mlp"))
    for override in overrides:
        base = configs.merge(base, override)
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({"base": "base.yaml"} | tree, sort_keys=False))
    return path


def final_state(run: Run, step: int) -> dict[str, np.ndarray]:
    config = configs.load(run.folder / "config.yaml", ["mesh.devices=1"], ExperimentConfig)
    experiment = build(config)
    restored = open_checkpoints(run, experiment, {}, read_only=True).restore(step, experiment.abstract_state)
    return {name: np.asarray(x) for name, x in flatten(restored).items()}


def records(run: Run) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(("time", "perf/"))}
        for record in MetricsLog(run.folder).read()
    ]


MUON = {"kind": "muon", "learning_rate": 0.01, "adam": {"learning_rate": 1e-3}}


@pytest.mark.slow
def test_packed_runs_of_muon_are_those_trained_alone(data: Path, tmp_path: Path) -> None:
    rates = {"optimizer.momentum": 0.5, "optimizer.adam.learning_rate": 3e-3, "optimizer.adam.weight_decay": 0.5}
    variants = {"as it is": {}, "rates": rates, "rate": {"optimizer.learning_rate": 0.02}}
    study = load_study(write(tmp_path, data, set={"optimizer": MUON}, variants=variants, seeds=[3]))
    packed_and_alone(study, tmp_path, atol=5e-4)  # small directions of a gradient are rounded, and then made as long


def test_packed_runs_are_those_trained_alone(data: Path, tmp_path: Path) -> None:
    """Everything that a pack may vary differs; three runs on two devices, two to each and one place left over."""
    rates = {"optimizer.learning_rate": 3e-3, "optimizer.schedule.warmup_steps": 5, "optimizer.beta2": 0.99}
    rates |= {"optimizer.beta1": 0.8, "optimizer.batch_scaling": {"kind": "sqrt", "base_batch": 4}}
    others = {"ema_decay": 0.5, "optimizer.weight_decay": 0.3, "task.halting.exploration": 0.7}
    others |= {"task.q_loss_weight": 0.1, "optimizer.tables.learning_rate": 1e-2}
    variants = {"as it is": {}, "rates": rates, "others": others}
    packed_and_alone(load_study(write(tmp_path, data, variants=variants, seeds=[3])), tmp_path)


def packed_and_alone(study: Study, tmp_path: Path, atol: float = 2e-5) -> None:
    """Three runs, the one and the other way."""
    folder = tmp_path / "packed"
    assert [len(runs) for runs in plan_packs(study.runs, Run(folder), 2)] == [3]
    ended = run_study(study, Run(folder), quiet(), devices=jax.devices()[:2])
    assert [(outcome.state, outcome.packed) for outcome in ended.outcomes] == [("done", 3)] * 3
    for run in study.runs:
        alone = Run(tmp_path / "alone" / run.name)
        train(run.config.model_copy(update={"mesh": run.config.mesh.model_copy(update={"devices": 1})}), alone, quiet())
        place = run_of(folder, run.name)
        for ours, theirs in zip(records(place), records(alone), strict=True):
            assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-5), run.name
        expected = final_state(alone, 10)
        for name, found in final_state(place, 10).items():
            np.testing.assert_allclose(found, expected[name], rtol=2e-3, atol=atol, err_msg=f"{run.name} {name}")
    different = {record["train/loss"] for record in (records(run_of(folder, run.name))[-2] for run in study.runs)}
    assert len(different) == 3


@pytest.mark.slow
def test_a_run_that_diverges_is_marked_and_the_others_go_on(data: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        data,
        set={"nonfinite.rollback_after": 2},
        factors={"optimizer.learning_rate": [1e-3, 1e38]},
    )
    study, console = load_study(path), quiet()
    ended = run_study(study, Run(tmp_path / "s"), console, devices=jax.devices()[:1])
    assert [outcome.state for outcome in ended.outcomes] == ["done", "diverged"]
    assert "not finite in the last" in str(ended.outcomes[1].reason)
    assert ended.outcomes[1].step < 10
    assert "diverged at step" in console.file.getvalue()  # type: ignore[attr-defined]
    sound, bad = (run_of(tmp_path / "s", run.name) for run in study.runs)
    assert records(sound)[-1]["step"] == 10
    assert records(bad)[-1]["step"] == ended.outcomes[1].step
    before = records(sound)
    again = run_study(study, Run(tmp_path / "s"), console, devices=jax.devices()[:1])
    assert again.outcomes == ended.outcomes  # neither is tried again
    assert records(sound) == before


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 1], ids=["packed", "alone"])
def test_rules_end_runs_early_and_the_others_are_packed_anew(data: Path, tmp_path: Path, most: int | None) -> None:
    """Of four trials two go on after step 4, and one after step 8."""
    search = {"kind": "halving", "trials": 4, "rung_steps": [4, 8], "keep": 0.5}
    search |= {"space": {"optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "scale": "log"}}}
    path = write(tmp_path, data, set={"eval.every_steps": 4}, metric="eval/cell_accuracy", search=search)
    study = load_study(path)
    rates = [run.config.optimizer.learning_rate for run in study.runs]
    assert len(set(rates)) == 4
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    ended = run_study(study, Run(tmp_path / "s"), quiet(), most=most, devices=jax.devices()[:1])
    states = sorted((one.step, one.state) for one in ended.outcomes)
    if most is None:
        assert states == [(4, "stopped_early"), (4, "stopped_early"), (8, "stopped_early"), (10, "done")]
    scores = {
        run.name: {
            r["step"]: r["eval/cell_accuracy"]
            for r in records(run_of(tmp_path / "s", run.name))
            if "eval/cell_accuracy" in r
        }
        for run in study.runs
    }
    for run, outcome in zip(study.runs, ended.outcomes, strict=True):
        if outcome.state == "stopped_early":
            assert "not among the best" in str(outcome.reason)
            peers = [past[outcome.step] for past in scores.values() if outcome.step in past]
            assert scores[run.name][outcome.step] < max(peers)
            assert (run_of(tmp_path / "s", run.name).folder / CHECKPOINTS / str(outcome.step)).is_dir()


def test_a_run_that_fails_does_not_stop_the_others(data: Path, tmp_path: Path) -> None:
    variants = {"nothing": {"data.path": str(tmp_path / "nothing")}, "data": {}}
    study = load_study(write(tmp_path, data, set={"steps": 2}, variants=variants, seeds=2))
    ended = run_study(study, Run(tmp_path / "s"), quiet(), devices=jax.devices()[:1])
    assert [one.state for one in ended.outcomes] == ["failed", "failed", "done", "done"]
    assert "nothing" in str(ended.outcomes[0].reason)


def test_a_folder_of_another_study_is_refused(data: Path, tmp_path: Path) -> None:
    study = load_study(write(tmp_path, data, set={"steps": 2}, seeds=2))
    run_study(study, Run(tmp_path / "s"), quiet(), devices=jax.devices()[:1])
    other = load_study(write(tmp_path, data, set={"steps": 2}, factors={"batch_size": [8, 16]}))
    with pytest.raises(UserError, match="another study"):
        run_study(other, Run(tmp_path / "s"), quiet())
    changed = load_study(write(tmp_path, data, set={"steps": 3}, seeds=2))
    with pytest.raises(UserError, match="another config"):
        run_study(changed, Run(tmp_path / "s"), quiet())
    more = load_study(write(tmp_path, data, set={"steps": 2}, seeds=3))
    ended = run_study(more, Run(tmp_path / "s"), quiet(), devices=jax.devices()[:1])
    assert [one.state for one in ended.outcomes] == ["done"] * 3
    assert [one.packed for one in ended.outcomes] == [2, 2, 1]
    console = quiet()
    console.print(table(tmp_path / "s"))
    assert "tiny: 3 done" in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_ended_while_it_was_looked_at_stays_ended(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process, between looking and taking."""
    study = load_study(write(tmp_path, data, set={"steps": 2}, seeds=2))
    taken = study_run.claim

    def late(stack: Any, places: list[Run], worker: Any) -> list[bool]:
        write_outcome(places[0], Outcome("stopped_early", "enough", step=1))
        return taken(stack, places, worker)

    monkeypatch.setattr(study_run, "claim", late)
    ended = run_study(study, Run(tmp_path / "s"), quiet(), devices=jax.devices()[:1])
    assert [(one.state, one.step) for one in ended.outcomes] == [("stopped_early", 1), ("done", 2)]


def test_devices_of_a_run_alone(data: Path, tmp_path: Path) -> None:
    config = load_study(write(tmp_path, data, set={"batch_size": 12})).runs[0].config
    assert [most_devices(config, count) for count in (1, 4, 5, 8)] == [1, 4, 4, 6]
    fixed = config.model_copy(update={"mesh": config.mesh.model_copy(update={"data": 2})})
    assert most_devices(fixed, 8) == 2


@pytest.mark.slow
def test_a_run_alone_has_as_many_devices_as_its_batch_divides_over(data: Path, tmp_path: Path) -> None:
    study = load_study(write(tmp_path, data, set={"steps": 2, "batch_size": 12}))
    console = quiet()
    ended = run_study(study, Run(tmp_path / "s"), console, devices=jax.devices()[:8])
    assert [one.state for one in ended.outcomes] == ["done"]
    assert "batch 12 on 6 × cpu" in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    while not path.exists():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_study_that_is_stopped_goes_on_to_the_same_end(data: Path, tmp_path: Path, how: signal.Signals) -> None:
    path = write(
        tmp_path,
        data,
        set={"steps": 400, "eval.every_steps": 200, "checkpoint.every_steps": 20, "log.every_steps": 20},
        seeds=2,
    )
    study: Study = load_study(path)
    argv = [sys.executable, "-m", "tinypod", "study", "run", str(path), "--folder"]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with subprocess.Popen([*argv, str(tmp_path / "s")], env=environment, stdout=subprocess.DEVNULL) as process:
        wait_for(run_of(tmp_path / "s", study.runs[1].name).folder / CHECKPOINTS / "20", process)
        process.send_signal(how)
        code = process.wait(LIMIT_S)
    assert code == (143 if how is signal.SIGTERM else -9)
    outcome = read_outcome(run_of(tmp_path / "s", study.runs[0].name))
    assert outcome.state in ("waiting", "running")
    assert outcome.step < 400
    for folder in ("s", "whole"):
        subprocess.run(
            [*argv, str(tmp_path / folder)], env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL
        )
    for run in study.runs:
        stopped, whole = (run_of(tmp_path / folder, run.name) for folder in ("s", "whole"))
        # A stop writes the record of the steps since the last one, and the next record is of the rest.
        parts = {outcome.step, -(-outcome.step // 20) * 20} if outcome.step % 20 else set()
        left, right = ([r for r in records(one) if r["step"] not in parts] for one in (stopped, whole))
        assert left == right
        assert len(right) >= 20
        expected = final_state(whole, 400)
        for name, found in final_state(stopped, 400).items():
            np.testing.assert_array_equal(found, expected[name], err_msg=name)
        assert json.loads((stopped.folder / "outcome.json").read_text())["state"] == "done"
