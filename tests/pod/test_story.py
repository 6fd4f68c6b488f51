"""The whole story, by the command line, with real training processes as workers and a bucket that is a real server:
queued, granted, preempted at step 40, granted again, resumed, done."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from stand_in import Cloud

import gcs
from fixtures import CONFIGS, TINY, write_4x4
from tinypod.runs.metrics import MetricsLog

STEPS = 120


def wait_for(condition, process: subprocess.Popen, timeout_s: float = 600) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came to it"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
def test_a_preempted_run_is_brought_to_its_end(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = gcs.shared()
    url = "gs://tinypod-test/pod/story"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cloud.order(grant_after=2)
    spec = tmp_path / "pod.yaml"
    fields = {"project": "my-project", "zone": "us-central2-b", "name": "story", "type": "v4-16", "poll_s": 0.5}
    fields |= {"request": {"kind": "queued", "spot": True}, "retry_s": 0.5, "python": sys.executable}
    spec.write_text(yaml.safe_dump({**fields, "spending_limit_dollars": 50.0}))
    overrides = [*TINY, f"steps={STEPS}", "checkpoint.every_steps=20", "eval.every_steps=60"]
    overrides += [f"data.path={write_4x4(tmp_path / 'data')}", "health.step_timeout_s=240"]
    config = str(CONFIGS / "trm" / "sudoku_mlp.yaml")
    command = [sys.executable, "-m", "tinypod", "pod", "run", str(spec), config, *overrides, "--run", url]
    environment = {**os.environ, "COLUMNS": "200"}

    def start(*more: str) -> subprocess.Popen:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*command, *more], env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
        )

    def committed(step: int) -> bool:
        return f"checkpoints/{step}/commit_success.txt" in store.files(url)

    keeper = start("--keep", "--down")
    try:
        wait_for(lambda: committed(40), keeper)
        assert not committed(STEPS), "too late to preempt it"
        assert len(list((cloud.folder / "workers" / "story").glob("*"))) == 2
        cloud.preempt("story")
        said = keeper.communicate(timeout=900)[0]
    finally:
        keeper.kill()
        keeper.communicate()
    assert keeper.returncode == 0, said

    # What was asked of Google, in order.
    asked = [command for command in cloud.commands() if command.split()[1] in ("create", "delete")]
    assert asked == ["queued-resources create", "queued-resources delete"] * 2
    for words in ("waiting (WAITING_FOR_RESOURCES", "ready after", "the slice was lost at step"):
        assert words in said, said
    assert "lost (SUSPENDED" in said or "lost (PREEMPTED" in said, (
        said
    )  # the request, or the node, whichever is seen first
    with cloud.state() as state:
        assert (state["nodes"], state["requests"]) == ({}, {})  # --down

    # Both workers trained, twice; the second time from a checkpoint of the first.
    starts = [line for line in said.splitlines() if line.startswith(f"[0] {url}: ")]
    assert all("in 2 processes" in line for line in starts), said
    first, second = (int(line.partition("; steps ")[2].removesuffix(f" to {STEPS}")) for line in starts)
    assert first == 0
    assert second in range(40, STEPS, 20)
    logs = sorted((tmp_path / "cache").rglob("logs/worker_*.log"))
    assert [log.name for log in logs] == ["worker_0.log", "worker_1.log"]
    assert all(log.read_text().count("--- ") == 2 for log in logs)

    # The run is whole, as if nothing had happened, and belongs to nobody.
    files = store.files(url)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "metrics.jsonl").write_bytes(files["metrics.jsonl"])
    steps = [row["step"] for row in MetricsLog(tmp_path / "copy").read() if "train/loss" in row]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS
    assert committed(STEPS)
    assert "owner.lock" not in files
    assert "keeper.lock" not in files
    grants = json.loads(files["pod.json"])["grants"]
    assert len(grants) == 2
    assert all(grant["hourly_dollars"] == pytest.approx(8 * 3.22 * 0.29) for grant in grants)
