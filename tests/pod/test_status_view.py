"""What `pod status` says of a run that is being trained."""

import json
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from specs import make_spec
from stand_in import Cloud
from test_lifecycle import recording, text
from test_workers import FILES

import gcs
from tinypod.pod.gcloud import Gcloud
from tinypod.pod.status_view import PodStatus
from tinypod.pod.workers import Workers


def show(status: PodStatus) -> str:
    console: Console = recording()
    console.print(status.render())
    return text(console)


def test_each_worker_has_its_step_lag_and_heartbeat(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store, url = gcs.shared(), "gs://tinypod-test/pod-status/run"
    gcloud = Gcloud(make_spec(python=sys.executable))
    gcloud.create_node()
    workers = Workers(gcloud)
    workers.send(FILES, recording())
    workers.start(url, ["wait"], {})
    assert "none yet" in show(PodStatus(gcloud))  # before its first heartbeat
    now = time.time()
    for process, step in ((0, 1200), (1, 1100)):
        beat = {"process": process, "count": 2, "step": step, "phase": "stepping", "time": now, "every_s": 3600.0}
        beat |= {"host": "elsewhere", "step_ms": {"p50": 10.0}}
        store.put(f"{url}/health/process_{process}.json", json.dumps(beat).encode())
    store.put(f"{url}/config.yaml", b"steps: 5000\n")
    grant = {"name": "trainer", "since": now - 7200, "until": now, "hourly_dollars": 10.0}
    store.put(f"{url}/pod.json", json.dumps({"grants": [grant]}).encode())
    status = PodStatus(gcloud)
    said = show(status)
    assert "trainer (v4-16): ready (READY), up for" in said
    assert f"{url}: running: 2 of 2 processes, step 1,200 of 5,000, 1 straggler" in said
    first, second = (line.split() for line in said.splitlines() if line.strip().startswith(("0 ", "1 ")))
    assert first[:4] == ["0", "running", "1,200", "stepping"]
    assert second[:5] == ["1", "running", "1,100", "100", "stepping"]
    assert second[-1] == "lagging"
    assert "spent: $20.00 for 2 h 00 min on v4-16" in said
    assert status.as_json()["status"]["step"] == 1200
    cloud.order(bad_worker=1)
    assert "not reached" in show(PodStatus(gcloud))
    cloud.order(bad_worker=None)
    workers.stop(60)
    assert "ended (143)" in show(PodStatus(gcloud))
