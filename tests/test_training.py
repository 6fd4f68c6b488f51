"""Whole runs: stopped and gone on with, killed, finished, and never traced twice."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from fixtures import CONFIGS, TINY, tiny_config, write_4x4
from poison import poisoned
from tinypod import step, tasks, training
from tinypod.config import load
from tinypod.errors import CheckpointError, ConfigError
from tinypod.experiment import ExperimentConfig, build
from tinypod.runs import config_history, folder
from tinypod.runs.checksums import flatten
from tinypod.runs.folder import Run
from tinypod.runs.load import load_weights
from tinypod.runs.metrics import MetricsLog
from tinypod.runs.saver import open_checkpoints
from tinypod.sharding import MeshConfig

CONFIG = CONFIGS / "trm" / "sudoku_mlp.yaml"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("train") / "data")


def changes_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / config_history.CHANGES).read_text().splitlines()]


def quiet() -> Console:
    return Console(file=StringIO())


def command(data: Path, run_dir: Path, *overrides: str) -> list[str]:
    """The command line, as a user's shell would start it."""
    return [
        sys.executable,
        "-m",
        "tinypod",
        "train",
        str(CONFIG),
        *TINY,
        f"data.path={data}",
        *overrides,
        "--run",
        str(run_dir),
    ]


def in_a_process(data: Path, run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(data, run_dir, *overrides), capture_output=True, text=True, timeout=300, check=False)


def state_at(data: Path, run_dir: Path, number: int) -> dict[str, np.ndarray]:
    config = folder.read_config(Run(run_dir)).model_copy(update={"mesh": MeshConfig()})  # whatever mesh it was made on
    experiment = build(config)
    checkpoints = open_checkpoints(Run(run_dir), experiment, {}, read_only=True)
    return {name: np.asarray(x) for name, x in flatten(checkpoints.restore(number, experiment.abstract_state)).items()}


def rows(run_dir: Path, *, without_time: bool = True) -> list[dict]:
    changing = ("time",) if without_time else ()
    return [
        {k: v for k, v in row.items() if k not in changing and not k.startswith("perf/")}
        for row in MetricsLog(run_dir).read()
    ]


def assert_same_states(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps in one process."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    done = in_a_process(data, run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir


def test_ten_steps_are_five_and_five_in_a_new_process_to_the_bit(data: Path, straight: Path, tmp_path: Path) -> None:
    for steps in ("steps=5", "steps=10"):
        done = in_a_process(data, tmp_path / "run", steps)
        assert done.returncode == 0, done.stderr
    assert "resuming from the checkpoint of step 5" in done.stdout
    assert "from step 5 on, steps: 5 -> 10" in done.stdout
    assert [(line["step"], line["changes"]) for line in changes_of(tmp_path / "run")] == [(5, ["steps: 5 -> 10"])]
    a, b = (state_at(data, place, 10) for place in (straight, tmp_path / "run"))
    assert int(a["step"]) == 10
    assert {name.split(".")[0] for name in a} == {"step", "params", "opt_state", "ema", "carry"}
    assert_same_states(a, b)
    # The halves log one more row, at their seam; evaluations are the same.
    evals = [[row for row in rows(place) if "eval/exact_accuracy" in row] for place in (straight, tmp_path / "run")]
    assert evals[0] == evals[1]
    assert len(evals[0]) == 2


def test_a_run_leaves_what_it_promises(data: Path, straight: Path) -> None:
    assert {"config.yaml", "metrics.jsonl", "curves.png", "checkpoints"} <= {p.name for p in straight.iterdir()}
    assert (straight / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert folder.read_config(Run(straight)) == tiny_config(data)
    logged = [row["step"] for row in rows(straight) if "train/loss" in row]
    assert logged == [2, 4, 5, 6, 8, 10]
    assert sorted(int(p.name) for p in (straight / "checkpoints").iterdir()) == [5, 10]


def test_a_finished_run_is_left_as_it_is(data: Path, straight: Path) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    done = in_a_process(data, straight)
    assert done.returncode == 0
    assert "nothing left to do at step 10" in done.stdout
    assert (straight / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_next_start_goes_on(data: Path, straight: Path, tmp_path: Path, number: int) -> None:
    """However the moment falls, no step is lost: the checkpoint is of the last step that was logged."""
    endless = ("steps=1000000", "eval.every_steps=null", "checkpoint.every_steps=null", "log.every_steps=1")
    process = subprocess.Popen(command(data, tmp_path / "run", *endless), stdout=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3, process)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + number
    assert "run it again to resume" in output
    last = rows(tmp_path / "run")[-1]["step"]
    assert [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()] == [last]
    done = in_a_process(data, tmp_path / "run", *endless, f"steps={last + 2}")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(tmp_path / "run") if "train/loss" in row] == list(range(1, last + 3))


def wait_for(condition, process: subprocess.Popen, timeout_s: float = 200) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "it ended early"
        assert time.monotonic() < end, "it never came to it"
        time.sleep(0.02)


def test_a_killed_run_goes_on_from_its_last_checkpoint(data: Path, straight: Path, tmp_path: Path) -> None:
    """SIGKILL after the first save, rows past the checkpoint already logged: the end is that of the straight run."""
    settings = ("log.every_steps=1", "steps=1000000", "checkpoint.every_steps=5", "eval.every_steps=null")
    process = subprocess.Popen(command(data, tmp_path / "run", *settings), stdout=subprocess.DEVNULL)
    saved = tmp_path / "run" / "checkpoints"
    wait_for(lambda: any(p.name.isdigit() for p in saved.glob("*")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    latest = max(int(p.name) for p in saved.iterdir() if p.name.isdigit())
    done = in_a_process(data, tmp_path / "run", *settings, f"steps={latest + 3}")
    assert done.returncode == 0, done.stderr
    assert f"resuming from the checkpoint of step {latest}" in done.stdout
    assert [row["step"] for row in rows(tmp_path / "run") if "train/loss" in row] == list(range(1, latest + 4))


def test_the_step_is_traced_once_in_a_whole_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    original = step.make_train_step

    def counting(*args, **kwargs):
        function = original(*args, **kwargs)

        def traced(*inputs):
            traces.append(1)
            return function(*inputs)

        return traced

    monkeypatch.setattr(step, "make_train_step", counting)
    training.train(tiny_config(data), Run(tmp_path / "run"), quiet())
    assert len(traces) == 1


def test_a_stop_that_comes_while_evaluating_is_obeyed_after_saving(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = training.Evaluator.__call__

    def interrupted(self, params, progress=None):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, params, progress)

    monkeypatch.setattr(training.Evaluator, "__call__", interrupted)
    outcome = training.train(tiny_config(data, "checkpoint.every_steps=null"), Run(tmp_path / "run"), quiet())
    assert (outcome.step, outcome.stopped_by) == (5, signal.SIGTERM)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["5"]
    assert rows(tmp_path / "run")[-1]["step"] == 5


def test_another_model_in_the_same_folder_is_refused_and_nothing_touched(data: Path, straight: Path) -> None:
    before = (straight / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"another model.*\n  model\.hidden_size: 16 -> 32\n.*--run .*run_2"):
        training.train(tiny_config(data, "model.hidden_size=32", "steps=12"), Run(straight), quiet())
    assert (straight / "config.yaml").read_bytes() == before


def test_two_processes_cannot_train_in_one_folder(data: Path, straight: Path) -> None:
    with folder.lock(Run(straight)):
        done = in_a_process(data, straight)
    assert done.returncode == 2
    assert f"another process is training here (pid {os.getpid()})" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_checkpoint_is_stepped_over_on_request(data: Path, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / "10" / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 5000:
            path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="--from-step 5"):
        training.train(tiny_config(data), Run(tmp_path / "run"), quiet())
    training.train(tiny_config(data), Run(tmp_path / "run"), quiet(), from_step=5)
    assert (tmp_path / "run" / "checkpoints_set_aside" / "10").is_dir()
    assert_same_states(state_at(data, tmp_path / "run", 10), state_at(data, straight, 10))


def test_another_dataset_is_refused(data: Path, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "run")
    other = write_4x4(tmp_path / "data", train=30)
    with pytest.raises(ConfigError, match=r"not the data that this run was trained on \(train differ\)"):
        training.train(tiny_config(other, "steps=11"), Run(tmp_path / "run"), quiet())
    shutil.copytree(data, tmp_path / "moved")
    training.train(tiny_config(tmp_path / "moved", "steps=11"), Run(tmp_path / "run"), quiet())


def files(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_finished_run_cannot_be_made_to_say_something_else(data: Path, straight: Path, tmp_path: Path) -> None:
    """config.yaml is what the steps were trained with: an override that trains nothing is refused, and changes no
    file."""
    shutil.copytree(straight, tmp_path / "run")
    before = files(tmp_path / "run")
    refused = r"it is finished, at step 10\n  optimizer\.learning_rate: 0\.001 -> 0\.1\n.*--run .*run_2"
    with pytest.raises(ConfigError, match=refused):
        training.train(tiny_config(data, "optimizer.learning_rate=0.1"), Run(tmp_path / "run"), quiet())
    with pytest.raises(ConfigError, match="steps: 10 -> 7"):
        training.train(tiny_config(data, "steps=7"), Run(tmp_path / "run"), quiet())
    training.train(
        tiny_config(data, "log.every_steps=1"), Run(tmp_path / "run"), quiet()
    )  # trains nothing, says nothing
    assert files(tmp_path / "run") == before


def test_an_unfinished_run_records_from_which_step_a_change_holds(data: Path, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "run")
    changed = tiny_config(data, "steps=12", "optimizer.learning_rate=5e-4")
    training.train(changed, Run(tmp_path / "run"), quiet())
    (line,) = changes_of(tmp_path / "run")
    assert (line["step"], sorted(line["changes"])) == (
        10,
        ["optimizer.learning_rate: 0.001 -> 0.0005", "steps: 10 -> 12"],
    )
    assert folder.read_config(Run(tmp_path / "run")) == changed
    rates = {row["step"]: row["train/learning_rate"] for row in rows(tmp_path / "run") if "train/learning_rate" in row}
    assert (rates[10], rates[12]) == pytest.approx((1e-3, 5e-4))


def test_a_start_that_fails_leaves_a_finished_run_as_it_was(data: Path, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        training.train(tiny_config(data), Run(tmp_path / "run"), quiet(), from_step=7)
    assert files(tmp_path / "run") == before


@pytest.mark.slow
def test_a_stop_inside_a_streak_of_bad_steps_changes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches 5 to 7 are NaN, three in a row roll back; the stopped run is asked to end after the first of them."""
    bad = ("nonfinite.rollback_after=3", "log.every_steps=1", "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    monkeypatch.setitem(tasks.KINDS, "puzzle", poisoned(tasks.KINDS["puzzle"], {5, 6, 7}))
    config = tiny_config(data, *bad, "eval.every_steps=null")
    training.train(config, Run(tmp_path / "straight"), quiet())
    beat = training.Health.beat

    def interrupting(self, step=None):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        beat(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(training.Health, "beat", interrupting)
        assert training.train(config, Run(tmp_path / "stopped"), quiet()).step == 6
    console = quiet()
    training.train(config, Run(tmp_path / "stopped"), console)
    assert "steps 6 to 8 were not finite: back from step 8 to step 4" in console.file.getvalue().replace("\n", " ")
    assert_same_states(*(state_at(data, tmp_path / name, 10) for name in ("straight", "stopped")))


def test_a_late_score_makes_its_checkpoint_the_best(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last evaluation is cut off by a stop and made on resume, after its checkpoint was saved."""
    original = training.Evaluator.__call__

    def interrupted(self, params, progress=None):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, params, progress)

    config = tiny_config(data, "eval.every_steps=null")
    with monkeypatch.context() as patched:
        patched.setattr(training.Evaluator, "__call__", interrupted)
        training.train(config, Run(tmp_path / "run"), quiet())
    outcome = training.train(config, Run(tmp_path / "run"), quiet())
    assert outcome.best is not None
    assert outcome.best[0] == 10
    assert load_weights(Run(tmp_path / "run"), [], "best").step == 10


def test_metrics_that_close_slowly_do_not_fail_a_finished_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing is a phase of its own, with its own deadline."""
    phases = []
    original = training.RunLog.close

    def closing(self, **options):
        phases.append(current())
        original(self, **options)

    def current() -> str:
        return running[-1].current

    running = []
    enter = training.Health.__enter__
    monkeypatch.setattr(training.Health, "__enter__", lambda self: running.append(self) or enter(self))
    monkeypatch.setattr(training.RunLog, "close", closing)
    training.train(tiny_config(data), Run(tmp_path / "run"), quiet())
    assert phases[-1] == "closing"


def test_the_loop_fetches_each_step_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = []
    original = jax.device_get
    monkeypatch.setattr(training.jax, "device_get", lambda x: fetches.append(1) or original(x))
    off = ("eval.every_steps=null", "checkpoint.every_steps=null", "log.every_steps=4", "checkpoint.best=null")
    training.train(tiny_config(data, *off), Run(tmp_path / "run"), quiet())
    assert len(fetches) == 10 + 1  # the sums of the one evaluation


def test_metrics_are_json_with_the_names_that_are_documented(straight: Path) -> None:
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line}
    assert {
        "step",
        "time",
        "train/loss",
        "train/lm_loss",
        "train/q_loss",
        "train/grad_norm",
        "train/learning_rate",
    } <= names
    assert {"eval/exact_accuracy", "eval/cell_accuracy", "eval/halt_accuracy", "eval/steps", "eval/count"} <= names
    assert {"perf/examples_per_s", "perf/step_ms", "perf/model_tflops"} <= names


MANY = ("steps_per_dispatch=4", "log.every_steps=4", "eval.every_steps=8", "checkpoint.every_steps=8", "steps=18")


@pytest.fixture(scope="module")
def one_by_one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighteen steps, each dispatched by itself."""
    run_dir = tmp_path_factory.mktemp("one_by_one") / "run"
    training.train(tiny_config(data, *MANY, "steps_per_dispatch=1"), Run(run_dir), quiet())
    return run_dir


@pytest.mark.slow
def test_steps_in_one_dispatch_are_the_steps_one_by_one_to_the_bit(
    data: Path, one_by_one: Path, tmp_path: Path
) -> None:
    """Four at a time, and two at the end: the states, every row of metrics, the checkpoints."""
    outcome = training.train(tiny_config(data, *MANY), Run(tmp_path / "run"), quiet())
    assert (outcome.step, outcome.experiment.steps_per_dispatch) == (18, 4)
    assert rows(tmp_path / "run") == rows(one_by_one)
    assert [row["step"] for row in rows(one_by_one) if "train/loss" in row] == [4, 8, 12, 16, 18]
    saved = [sorted(p.name for p in (place / "checkpoints").iterdir()) for place in (tmp_path / "run", one_by_one)]
    assert saved[0] == saved[1]
    assert_same_states(*(state_at(data, place, 18) for place in (tmp_path / "run", one_by_one)))


def test_a_run_resumes_in_the_middle_of_a_dispatch_to_the_bit(data: Path, one_by_one: Path, tmp_path: Path) -> None:
    """Six steps, the last two dispatched together; then two, to the next point where all is due, and four at a time."""
    training.train(tiny_config(data, *MANY, "steps=6"), Run(tmp_path / "run"), quiet())
    outcome = training.train(tiny_config(data, *MANY), Run(tmp_path / "run"), quiet())
    assert outcome.experiment.steps_per_dispatch == 4
    logged = [row["step"] for row in rows(tmp_path / "run") if "train/loss" in row]
    assert logged == [4, 6, 8, 12, 16, 18]
    assert_same_states(*(state_at(data, place, 18) for place in (tmp_path / "run", one_by_one)))


def test_a_stop_is_obeyed_after_the_dispatch_that_it_comes_in(
    data: Path, one_by_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = training.Health.beat

    def interrupting(self, step=None):
        if step == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        beat(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(training.Health, "beat", interrupting)
        assert training.train(tiny_config(data, *MANY), Run(tmp_path / "run"), quiet()).step == 12
    assert rows(tmp_path / "run")[-1]["step"] == 12
    training.train(tiny_config(data, *MANY), Run(tmp_path / "run"), quiet())
    assert rows(tmp_path / "run") == rows(one_by_one)
    assert_same_states(*(state_at(data, place, 18) for place in (tmp_path / "run", one_by_one)))


@pytest.mark.slow
def test_batches_are_left_out_in_the_middle_of_a_dispatch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches 9 to 11 are NaN, and are passed over in both: the run goes back to step 8 and takes 8, 12, 13, …"""
    monkeypatch.setitem(tasks.KINDS, "puzzle", poisoned(tasks.KINDS["puzzle"], {9, 10, 11}))
    for many in ("1", "4"):
        config = tiny_config(data, *MANY, "nonfinite.rollback_after=3", f"steps_per_dispatch={many}")
        training.train(config, Run(tmp_path / many), quiet())
        assert json.loads((tmp_path / many / "rollbacks.json").read_text())[0]["batches"] == 3
    one, four = (list(rows(tmp_path / many)) for many in ("1", "4"))
    reached = [[row.pop("health/rolled_back_from_step", None) for row in logged] for logged in (one, four)]
    assert one == four
    assert [max(filter(None, steps)) for steps in reached] == [13, 16]  # by when the third of them was known
    assert_same_states(*(state_at(data, tmp_path / many, 18) for many in ("1", "4")))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 4),
        (("steps_per_dispatch=100",), 4),  # no further than the next row of metrics
        (("steps_per_dispatch=3",), 2),
        (("checkpoint.every_steps=6",), 2),
        (("health.replica_check_every_steps=3",), 1),
        (("eval.every_steps=null", "checkpoint.every_steps=null", "log.every_steps=50", "steps_per_dispatch=30"), 25),
        (("steps_per_dispatch=auto",), 1),  # on CPUs
    ],
)
def test_a_dispatch_ends_where_something_else_is_due(data: Path, overrides: tuple[str, ...], expected: int) -> None:
    assert build(tiny_config(data, *MANY, *overrides)).steps_per_dispatch == expected


def test_by_default_short_steps_go_to_an_accelerator_together_and_long_ones_alone(data: Path) -> None:
    device = SimpleNamespace(platform="gpu")
    mesh: Any = SimpleNamespace(size=1, devices=np.array([device]))
    auto = (
        *MANY,
        "steps_per_dispatch=auto",
        "log.every_steps=20",
        "eval.every_steps=400",
        "checkpoint.every_steps=1000",
    )
    small = dataclasses.replace(build(tiny_config(data, *auto)), mesh=mesh)
    assert small.steps_per_dispatch == 20
    long = dataclasses.replace(small, task=dataclasses.replace(small.task, flops=lambda training: 10**12))
    assert long.steps_per_dispatch == 1


def test_a_task_whose_batches_the_host_reads_takes_one_step_at_a_time() -> None:
    assert load("distill/tiny", ["steps_per_dispatch=1"], ExperimentConfig).steps_per_dispatch == 1
    with pytest.raises(ConfigError, match="steps_per_dispatch=8: the host reads each batch of a task of kind distill"):
        load("distill/tiny", ["steps_per_dispatch=8"], ExperimentConfig)
