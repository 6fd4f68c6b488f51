"""Whole runs in several real processes: the same results, nothing lost, and whoever hangs is named."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fixtures import write_4x4
from test_training import assert_same_states, command, state_at, wait_for
from test_training import rows as all_rows
from tinypod.errors import DeadlineError
from tinypod.health.heartbeat import read_heartbeats
from tinypod.runs.folder import HEALTH

# The weights of a run with 8 devices and one with 1 agree to float noise, which grows with every step.
STEPS = ("steps=6", "checkpoint.every_steps=3", "eval.every_steps=null", "log.every_steps=1")
ENDLESS = ("steps=1000000", "checkpoint.every_steps=4", "eval.every_steps=null", "log.every_steps=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("cluster") / "data")


def cluster(data: Path, run_dir: Path, processes: int, devices: int, *overrides: str, more: tuple = ()) -> list[str]:
    shape = ("--processes", str(processes), "--devices-per-process", str(devices))
    return [*command(data, run_dir, *overrides), *shape, *more]


def finished(argv: list[str], code: int = 0) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def pids(run_dir: Path, alive: bool = True) -> dict[int, int]:
    beats = read_heartbeats(run_dir / HEALTH)
    return {beat.process: beat.pid for beat in beats if not (alive and beat.is_gone())}


def rows(run_dir: Path) -> list[dict]:
    """Those of training; the last step has one of the evaluation, too."""
    return [row for row in all_rows(run_dir) if "train/loss" in row]


def logged(run_dir: Path) -> int:
    log = run_dir / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def started(argv: list[str], run_dir: Path, processes: int, steps: int = 5) -> subprocess.Popen:
    """A cluster that has made some steps."""
    before = logged(run_dir)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: logged(run_dir) >= before + steps and len(pids(run_dir)) == processes, process)
    return process


def ended(process: subprocess.Popen) -> str:
    return process.communicate(timeout=600)[0]


def assert_close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float = 5e-4) -> None:
    assert a.keys() == b.keys()
    for name in a:
        x, y = a[name].astype(np.float64), b[name].astype(np.float64)
        assert np.abs(x - y).max() <= tolerance * max(np.abs(y).max(), 1e-6), name


@pytest.fixture(scope="module")
def one_by_eight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one_by_eight") / "run"
    finished(cluster(data, run_dir, 1, 8, *STEPS))
    return run_dir


@pytest.fixture(scope="module")
def two_by_four(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("two_by_four") / "run"
    finished(cluster(data, run_dir, 2, 4, *STEPS, more=("--profile", "2:3")))
    return run_dir


def test_two_times_four_are_one_times_eight(data: Path, one_by_eight: Path, two_by_four: Path) -> None:
    for step in (3, 6):
        a, b = (state_at(data, folder, step) for folder in (one_by_eight, two_by_four))
        assert_close(a, b)
        assert np.array_equal(a["carry.example.inputs"], b["carry.example.inputs"])


def test_every_process_has_a_log_and_only_the_first_prints(two_by_four: Path) -> None:
    first, second = ((two_by_four / "logs" / f"process_{i}.log").read_text() for i in range(2))
    assert "8 × cpu in 2 processes" in first
    assert "steps 0 to 6" not in second


def test_every_process_is_profiled(two_by_four: Path) -> None:
    for process in range(2):
        assert len(list((two_by_four / "profile" / f"process_{process}").rglob("*.xplane.pb"))) == 1


@pytest.mark.slow
def test_four_times_two_on_a_mesh_of_three_axes(data: Path, one_by_eight: Path, tmp_path: Path) -> None:
    finished(cluster(data, tmp_path / "run", 4, 2, *STEPS, "mesh={data: 2, fsdp: 2, tensor: 2}"))
    assert_close(*(state_at(data, folder, 6) for folder in (one_by_eight, tmp_path / "run")))


@pytest.mark.slow
def test_four_times_two_are_one_times_eight(data: Path, one_by_eight: Path, tmp_path: Path) -> None:
    finished(cluster(data, tmp_path / "run", 4, 2, *STEPS))
    assert_close(*(state_at(data, folder, 6) for folder in (one_by_eight, tmp_path / "run")))


@pytest.mark.slow
def test_a_run_resumes_elsewhere_with_the_same_batches(data: Path, two_by_four: Path, tmp_path: Path) -> None:
    """From step 3 of 2 × 4 devices on 1 × 2, split over fsdp: the same examples, the same weights up to noise."""
    shutil.copytree(two_by_four, tmp_path / "run")
    argv = cluster(data, tmp_path / "run", 1, 2, *STEPS, "mesh={data: 1, fsdp: 2}", more=("--from-step", "3"))
    assert "resuming from the checkpoint of step 3" in finished(argv)
    a, b = (state_at(data, folder, 6) for folder in (two_by_four, tmp_path / "run"))
    assert_close(a, b)
    assert np.array_equal(a["carry.example.inputs"], b["carry.example.inputs"])


@pytest.mark.slow
def test_killed_and_started_again_ends_as_if_never_killed(data: Path, two_by_four: Path, tmp_path: Path) -> None:
    """SIGKILL of one process takes all down with its code; `--supervise` starts them again by itself, to the bit."""
    run_dir = tmp_path / "run"
    process = started(cluster(data, run_dir, 2, 2, *ENDLESS), run_dir, 2)
    os.kill(pids(run_dir)[1], signal.SIGKILL)
    output = ended(process)
    assert process.returncode == 128 + signal.SIGKILL, output
    assert "process 1 was killed by SIGKILL" in output
    last = logged(run_dir)

    process = started(cluster(data, run_dir, 2, 2, *ENDLESS, more=("--supervise",)), run_dir, 2, steps=2)
    before = pids(run_dir)
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: len(new := pids(run_dir)) == 2 and not set(new.values()) & set(before.values()), process)
    wait_for(lambda: rows(run_dir)[-1]["step"] > last + 4, process)
    process.send_signal(signal.SIGTERM)
    output = ended(process)
    assert process.returncode == 128 + signal.SIGTERM, output
    reached = rows(run_dir)[-1]["step"]
    assert [row["step"] for row in rows(run_dir)] == list(range(1, reached + 1))

    finished(cluster(data, tmp_path / "straight", 2, 2, *ENDLESS, f"steps={reached}"))
    assert_same_states(*(state_at(data, folder, reached) for folder in (run_dir, tmp_path / "straight")))


@pytest.mark.slow
def test_a_sigterm_to_one_stops_all_at_one_step_and_loses_none(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = cluster(data, run_dir, 2, 2, *ENDLESS, "checkpoint.every_steps=null")
    process = started(argv, run_dir, 2)
    os.kill(pids(run_dir)[1], signal.SIGTERM)
    output = ended(process)
    assert process.returncode == 128 + signal.SIGTERM, output
    last = rows(run_dir)[-1]["step"]
    assert [int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()] == [last]
    ends = {beat.ended for beat in read_heartbeats(run_dir / HEALTH)}
    assert ends == {"stopped: SIGTERM"}
    finished([*argv, f"steps={last + 1}"])
    assert [row["step"] for row in rows(run_dir)] == list(range(1, last + 2))


@pytest.mark.slow
def test_a_process_that_is_frozen_is_named_by_the_others(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    deadlines = ("health.step_timeout_s=20", "health.heartbeat_s=1")
    process = started(cluster(data, run_dir, 3, 1, "batch_size=12", *ENDLESS, *deadlines), run_dir, 3)
    victim = pids(run_dir)[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        output = ended(process)
    finally:
        if Path(f"/proc/{victim}").exists():
            os.kill(victim, signal.SIGKILL)
    assert process.returncode == DeadlineError.exit_code, output
    assert re.search(
        rf"suspect: process 1 \(host .*, pid {victim}\) has been silent for .*; it was \w+ at step", output
    )
    assert "health.step_timeout_s=20 has passed" in output
    assert "File " in (run_dir / "health" / "process_0.stack.txt").read_text()


def test_a_config_that_cannot_work_is_reported_once(data: Path, tmp_path: Path) -> None:
    output = finished(cluster(data, tmp_path / "run", 4, 2, "batch_sizes=3"), code=2)
    assert output.count("batch_sizes") == 1
    assert not (tmp_path / "run").exists()
