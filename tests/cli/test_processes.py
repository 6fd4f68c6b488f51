"""How a command becomes processes: the child's command line."""

import json
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fixtures import CONFIGS
from tinypod import cli
from tinypod.cli import processes
from tinypod.cluster import launch
from tinypod.errors import UserError
from tinypod.health.ledger import Ledger
from tinypod.runs.folder import Run
from tinypod.runs.saver import SUPERVISED


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would be started; each ends as one that a restart helps, the third one well."""
    started: list[list[str]] = []

    def run_child(argv: list[str], log_folder: Path, *, output: Console) -> int:
        started.append(argv[3:])
        return 0 if len(started) == 3 else 76

    monkeypatch.setattr(launch, "run_child", run_child)
    monkeypatch.setattr(launch.Interrupts, "sleep", lambda self, seconds: None)
    monkeypatch.setenv(SUPERVISED, "")  # what the supervisor sets goes again after the test
    return started


def test_a_supervised_process_of_a_pod_keeps_its_number(children: list[list[str]], tmp_path: Path) -> None:
    flags = ["--coordinator", "10.0.0.2:8476", "--num-processes", "4", "--process-id", "2"]
    run = ["--run", str(tmp_path / "run")]
    done = CliRunner().invoke(cli.app, ["train", str(CONFIGS / "demo.yaml"), "steps=7", *run, *flags, "--supervise"])
    assert done.exit_code == 0, done.output
    assert children == [["train", str(CONFIGS / "demo.yaml"), "steps=7", *run, *flags]] * 3


def test_a_rehearsal_cannot_join_a_pod(tmp_path: Path) -> None:
    flags = ["--processes", "2", "--coordinator", "10.0.0.2:8476"]
    done = CliRunner().invoke(cli.app, ["train", str(CONFIGS / "demo.yaml"), "--run", str(tmp_path / "run"), *flags])
    assert isinstance(done.exception, UserError)
    assert "--processes starts processes of its own, --coordinator joins others" in str(done.exception)


def test_from_step_is_asked_until_it_was_obeyed(children: list[list[str]], tmp_path: Path, monkeypatch) -> None:
    """The first start ends before it has restored anything, the second one after."""
    run_child = launch.run_child

    def restoring(argv: list[str], log_folder: Path, *, output: Console) -> int:
        if len(children) == 1:
            ledger = Ledger(tmp_path)
            ledger.begin(30)
            ledger.end("failed", 31)
        return run_child(argv, log_folder, output=output)

    monkeypatch.setattr(launch, "run_child", restoring)
    code = processes.train_apart(
        ["train"], 30, Run(tmp_path), Console(file=StringIO()), processes=None, devices_per_process=1, supervise=True
    )
    assert code == 0
    assert [("--from-step" in argv) for argv in children] == [True, True, False]


def test_progress_is_what_was_reached_since_the_supervisor_began(tmp_path: Path) -> None:
    """A heartbeat and rows of an earlier life, which was further, say nothing."""
    began = time.time()

    def write(step: int, at: float) -> None:
        (tmp_path / "health").mkdir(exist_ok=True)
        (tmp_path / "health" / "process_0.json").write_text(json.dumps({"process": 0, "step": step, "time": at}))
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "time": at}) + "\n")

    write(200, began - 60)
    assert processes._last_step(Run(tmp_path), after=began) is None
    write(70, began + 1)
    assert processes._last_step(Run(tmp_path), after=began) == 70


def test_a_damaged_ledger_does_not_end_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "goodput.json").write_text("{")
    assert not processes._began_at(Run(tmp_path), 30, after=0.0)
