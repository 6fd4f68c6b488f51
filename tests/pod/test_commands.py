"""`tinypod pod`, as it is typed."""

import json
from pathlib import Path

import pytest
import yaml
from stand_in import Cloud
from typer.testing import CliRunner

from fixtures import CONFIGS, TINY
from tinypod.cli import app
from tinypod.errors import UserError

FIELDS = {"project": "my-project", "zone": "us-central2-b", "name": "trainer", "type": "v4-16", "poll_s": 0.05}
DEMO = str(CONFIGS / "demo.yaml")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump({**FIELDS, "request": {"kind": "queued", "spot": True}}))
    return str(path)


def tinypod(*arguments: str, answer: str | None = None, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["pod", *arguments], input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_up_status_logs_and_down(cloud: Cloud, spec: str) -> None:
    assert "trainer: ready after" in tinypod("up", spec)
    assert "trainer (v4-16): ready (READY), up for" in tinypod("status", spec)
    found = json.loads(tinypod("status", spec, "--json"))
    assert (found["phase"], found["run"]) == ("ready", None)
    assert [worker["state"] for worker in found["workers"]] == ["none", "none"]
    assert tinypod("logs", spec) == ""
    with pytest.raises(UserError, match="--worker 2: v4-16 has workers 0 to 1"):
        tinypod("logs", spec, "--worker", "2")

    assert "Delete trainer (v4-16, ready (READY))?" in tinypod("down", spec, answer="n\n", code=1)
    assert "queued-resources delete" not in cloud.commands()
    cloud.preempt("trainer")  # what is suspended is deleted, too
    with cloud.state() as state:
        state["requests"]["old"] = {"name": "old", "state": "SUSPENDED", "looks": 0}
    said = tinypod("down", spec, answer="y\n")
    assert "use up quota: old (--dead)" in said
    assert "deleted trainer" in said
    with cloud.state() as state:
        assert (state["nodes"], list(state["requests"])) == ({}, ["old"])
    assert "deleted old" in tinypod("down", spec, "--dead", "--yes")
    assert "there is nothing to delete" in tinypod("down", spec)


def test_dry_runs_print_commands_and_run_none(cloud: Cloud, spec: str) -> None:
    up = tinypod("up", spec, "--dry-run")
    assert up.startswith("gcloud compute tpus queued-resources create trainer --node-id=trainer")
    arguments = [DEMO, "data.path=gs://b/data", "--run", "gs://b/my run;x", "--dry-run"]
    lines = tinypod("run", spec, *arguments).splitlines()
    assert all(line.startswith("gcloud compute tpus tpu-vm ") for line in lines)
    assert sum(" scp " in line for line in lines) == 1
    starts = [line for line in lines if "worker.py start" in line]
    assert len(starts) == 2
    assert all("--run=gs://b/my run;x" in line for line in starts)
    assert "queued-resources delete trainer --force" in tinypod("down", spec, "--dry-run")
    study = ["studies/width", "data.path=gs://b/data", "--run", "gs://b/study", "--dry-run"]
    starts = [line for line in tinypod("run", spec, *study).splitlines() if "worker.py start" in line]
    for number, line in enumerate(starts):
        assert "width.yaml" in line
        assert f"--worker={number}" in line
        assert "TPU_CHIPS_PER_PROCESS_BOUNDS" in line
    assert len(starts) == 2
    assert cloud.calls() == []


def test_what_cannot_work_is_said_before_anything_is_spent(cloud: Cloud, spec: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--run runs/x: expected gs://BUCKET/FOLDER"):
        tinypod("run", spec, DEMO, "--run", "runs/x")
    with pytest.raises(UserError, match=r"data.path=data/demo is a path on this machine"):
        tinypod("run", spec, DEMO, "data.path=data/demo", "--run", "gs://b/x")
    with pytest.raises(UserError, match=r"data.path=data/demo is a path on this machine"):
        tinypod("run", spec, "studies/width", "--run", "gs://b/x")
    with pytest.raises(UserError, match=r"mesh.slices=2: `tinypod pod` trains on one slice; set mesh.slices=1"):
        tinypod("run", spec, DEMO, "data.path=gs://b/d", "mesh.slices=2", "--run", "gs://b/x")
    with pytest.raises(UserError, match="--supervise is for one run"):
        tinypod("run", spec, "studies/width", "data.path=gs://b/d", "--run", "gs://b/x", "--supervise")
    with pytest.raises(UserError, match="batch_sze: unknown key"):
        tinypod("run", spec, DEMO, "batch_sze=3", "--run", "gs://b/x")
    with pytest.raises(UserError, match=r"SPEC: no file .*nothing.yaml; copy examples/pod.yaml"):
        tinypod("up", str(tmp_path / "nothing.yaml"))
    with pytest.raises(UserError, match="needs --slice"):
        tinypod("manifest", DEMO, "data.path=gs://b/d", "--run", "gs://b/x")
    assert cloud.calls() == []


def test_manifests_are_printed(spec: str) -> None:
    common = [DEMO, "data.path=gs://b/d", *TINY[:2], "--run", "gs://b/x", "--max-restarts", "7"]
    config_map, job_set = yaml.safe_load_all(tinypod("manifest", *common, "--slice", "v6e-16", "--image", "i"))
    assert yaml.safe_load(config_map["data"]["config.yaml"])["batch_size"] == 16  # resolved
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] == 7
    script = tinypod("manifest", *common, "--slurm", "--nodes", "2", "--gpus-per-node", "4")
    assert "#SBATCH --ntasks-per-node=4\n" in script
    assert "-lt 7" in script
    study = ["studies/width", "data.path=gs://b/d", "--run", "gs://b/x"]
    script = tinypod("manifest", *study, "--slurm", "--nodes", "2")
    assert "srun --kill-on-bad-exit=0 tinypod study run studies/width" in script
    assert "--folder=gs://b/x --workers=2" in script
