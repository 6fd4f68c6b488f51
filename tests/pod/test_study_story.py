"""A study on a slice, by the command line, with real training processes as hosts and a bucket that is a real server:
the hosts share its runs; the slice is preempted, granted again, and all runs come to their end."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from stand_in import Cloud
from typer.testing import CliRunner

import gcs
from fixtures import CONFIGS, TINY, write_4x4
from tinypod.cli import app

LIMIT_S = 900


@pytest.mark.slow
def test_a_study_on_a_slice_that_is_preempted(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, url = gcs.shared(), "gs://tinypod-test/pod/study"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec, study = tmp_path / "pod.yaml", tmp_path / "two_widths.yaml"
    fields = {"project": "my-project", "zone": "us-central2-b", "name": "study", "type": "v4-16", "poll_s": 0.5}
    fields |= {"request": {"kind": "queued", "spot": True}, "retry_s": 0.5, "python": sys.executable}
    spec.write_text(yaml.safe_dump(fields))
    base = str(CONFIGS / "trm" / "sudoku_mlp.yaml")
    study.write_text(yaml.safe_dump({"base": base, "factors": {"model.hidden_size": [16, 32]}, "seeds": 2}))
    overrides = [*TINY, "steps=400", "checkpoint.every_steps=50", "eval.every_steps=200"]
    overrides += [f"data.path={write_4x4(tmp_path / 'data')}", "health.step_timeout_s=240"]
    command = [sys.executable, "-m", "tinypod", "pod", "run", str(spec), str(study), *overrides, "--run", url]
    environment = {**os.environ, "COLUMNS": "200"}
    keeper = subprocess.Popen(
        [*command, "--keep", "--down"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not any("/checkpoints/50/commit_success" in name for name in store.files(url)):
            assert keeper.poll() is None, keeper.communicate()[0]
            assert time.monotonic() < deadline, "it never came to it"
            time.sleep(0.05)
        # In this process: one of its own would take longer to start than the rest of the training may last.
        shown = CliRunner().invoke(app, ["pod", "status", str(spec)], env={"COLUMNS": "200"}).stdout
        cloud.preempt("study")
        said = keeper.communicate(timeout=LIMIT_S)[0]
    finally:
        keeper.kill()
        keeper.communicate()
    assert keeper.returncode == 0, said
    assert "hidden_size=32,seed=1" in shown
    assert "running" in shown
    assert "the slice was lost" in said
    creations = [command for command in cloud.commands() if command == "queued-resources create"]
    assert len(creations) == 2
    files = store.files(url)
    outcomes = {name: json.loads(files[name]) for name in files if name.endswith("/outcome.json")}
    assert len(outcomes) == 4
    assert {(one["state"], one["step"]) for one in outcomes.values()} == {("done", 400)}
    assert "report/report.html" in files
    assert not [name for name in files if name.endswith(".lock")], "somebody still owns something"
    # Both hosts were started twice, and each run came to its last step once.
    assert all(said.count(f"[{number}] --- ") == 2 for number in range(2)), said
    for name in outcomes:
        log = files[name.replace("outcome.json", "metrics.jsonl")].splitlines()
        steps = [json.loads(line)["step"] for line in log if b"train/loss" in line]
        assert steps == sorted(set(steps))
        assert steps[-1] == 400
