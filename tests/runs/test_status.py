"""What `runs status` says of runs that go well, lag, hang, died or ended."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from tinypod.errors import UserError
from tinypod.health import goodput
from tinypod.health.heartbeat import Heartbeat, write_heartbeat
from tinypod.runs.status import as_json, judge, read_status, render_status, summary

NOW = 10_000.0


def beat(process: int, step: int = 1000, age: float = 1.0, ms: float = 100.0, **changes) -> Heartbeat:
    """Of a process on another host, unless it is said to be here."""
    values = {"count": 4, "host": "elsewhere", "pid": 7, "phase": "stepping", "phase_since": NOW - 90}
    values |= {"step_ms": {"p50": ms, "p90": ms, "max": ms} if ms else {}}
    return Heartbeat(process=process, **(values | {"step": step, "time": NOW - age} | changes))


def write(folder: Path, *beats: Heartbeat) -> Path:
    (folder / "health").mkdir(exist_ok=True)
    for one in beats:
        write_heartbeat(folder / "health", one)
    return folder


def verdicts(*beats: Heartbeat) -> list[str]:
    return [process.verdict for process in judge(list(beats), NOW)]


def shown(folder: Path, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(render_status(read_status(folder, NOW)))
    return captured.get()


def test_all_is_well(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 65104\n")
    write(tmp_path, *(beat(i) for i in range(4)))
    status = read_status(tmp_path, NOW)
    assert [process.verdict for process in status.processes] == ["ok"] * 4
    assert summary(status) == "running: 4 of 4 processes, step 1,000 of 65,104"


def test_a_lag_counts_beyond_the_steps_done_since_the_heartbeat():
    # 100 ms a step: four seconds between two heartbeats explain forty steps.
    assert verdicts(beat(0, age=0), beat(1, step=960, age=4)) == ["ok", "ok"]
    assert verdicts(beat(0, age=0), beat(1, step=900, age=4)) == ["ok", "lagging"]
    assert verdicts(beat(0, age=4), beat(1, step=990, age=0)) == ["ok", "lagging"]
    assert [p.lag for p in judge([beat(0), beat(1, step=990)], NOW)] == [0, 10]


def test_before_the_first_step_was_timed_nobody_lags():
    assert verdicts(beat(0, step=5, age=0, ms=0), beat(1, step=1, age=3, ms=0)) == ["ok", "ok"]


def test_slow_is_against_the_median():
    assert verdicts(beat(0), beat(1), beat(2), beat(3, ms=120)) == ["ok", "ok", "ok", "slow"]
    assert verdicts(beat(0), beat(1), beat(2), beat(3, ms=119)) == ["ok"] * 4
    assert verdicts(beat(0, ms=500)) == ["ok"]


def test_silent_is_three_intervals():
    assert verdicts(beat(0, age=15), beat(1, age=15.1), beat(2, age=3.1, every_s=1.0)) == ["ok", "silent", "silent"]


def test_what_an_earlier_start_left_behind_makes_nobody_lag():
    assert verdicts(beat(0, step=10), beat(1, step=5000, age=900)) == ["ok", "silent"]


def test_on_this_host_a_process_that_is_gone_is_known_at_once(tmp_path):
    here = {"host": socket.gethostname()}
    with subprocess.Popen(["true"]) as process:
        gone = process.pid
    assert verdicts(beat(0, pid=os.getpid(), **here), beat(1, pid=gone, **here)) == ["ok", "gone"]
    status = read_status(write(tmp_path, beat(0, count=2), beat(1, count=2, pid=gone, **here)), NOW)
    assert "running: 1 of 2 processes" in summary(status)


def test_stragglers_the_missing_and_the_dead_are_counted(tmp_path):
    write(tmp_path, beat(0, count=6), beat(1, step=10), beat(2, ms=300), beat(4, age=100))
    (tmp_path / "health" / "process_5.json").write_text("{")
    status = read_status(tmp_path, NOW)
    assert status.missing == [3]
    assert summary(status) == "running: 3 of 6 processes, step 1,000, 2 stragglers, 3 not alive"
    text = shown(tmp_path)
    for word in ("lagging", "slow", "silent", "no heartbeat", "unreadable", "process 5: its heartbeat cannot be read"):
        assert word in text


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (("done", "done"), "done: step 1,000, ended"),
        (("stopped: SIGTERM", "stopped: SIGTERM"), "no process is alive: step 1,000, last seen"),
        (("failed: no memory", "done"), "failed: no memory"),
    ],
)
def test_runs_that_ended(tmp_path, ends, said):
    status = read_status(write(tmp_path, *(beat(i, ended=how, count=2) for i, how in enumerate(ends))), NOW)
    assert said in summary(status)
    assert [process.verdict for process in status.processes] == [f"ended: {how}" for how in ends]


def test_a_run_that_died_says_when_it_was_last_seen(tmp_path):
    text = summary(read_status(write(tmp_path, beat(0, count=1, age=3700)), NOW))
    assert text.startswith("no process is alive: step 1,000, last seen ")
    assert text.endswith("1 h 01 min ago")


@pytest.mark.parametrize("width", [80, 60])
def test_everything_fits_a_terminal(tmp_path, width):
    names = [f"t1v-n-0123456789-w-{i}" for i in range(4)]
    failed = "failed: " + "a long reason " * 20
    beats = [beat(i, step=1_234_567, host=host, pid=4_000_000, ms=1234.5) for i, host in enumerate(names)]
    write(tmp_path, *beats[:3], beat(3, host=names[3], ended=failed))
    for step in (500, 1000):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    (tmp_path / "checkpoints" / "1500.orbax-checkpoint-tmp").mkdir()
    attempt = {"started": 0, "written": 100, "seconds": {"stepping": 90.0, "saving": 10.0}}
    (tmp_path / goodput.FILE).write_text(json.dumps({"version": 1, "attempts": [attempt]}))
    text = shown(tmp_path, width)
    assert max(map(len, text.splitlines())) <= width
    rows = text.splitlines()[1:]
    assert rows[0].split()[-1] == "verdict"
    assert [row.split()[-1] for row in rows[2:6]] == ["ok", "ok", "ok", "ended"]
    assert rows[6].startswith("(no room here for: pid, host")
    assert "process 3 ended: failed: a long reason" in text
    assert "checkpoints: 500, 1,000" in text
    assert "goodput 90.0%" in text


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "nope"):
        with pytest.raises(UserError, match=r"is not a run folder: it has neither config\.yaml nor health/"):
            read_status(folder, NOW)
    (tmp_path / "config.yaml").write_text("steps: [")
    assert "no heartbeat" in shown(tmp_path)
    assert read_status(tmp_path, NOW).steps is None


def test_for_programs(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 2000\n")
    write(tmp_path, beat(0, count=2), beat(1, count=2, step=900))
    told = json.loads(json.dumps(as_json(read_status(tmp_path, NOW))))
    assert (told["running"], told["step"], told["steps"], told["missing"]) == (True, 1000, 2000, [])
    assert [(p["process"], p["lag"], p["verdict"]) for p in told["processes"]] == [(0, 0, "ok"), (1, 100, "lagging")]
    assert told["goodput"]["goodput"] == 0
