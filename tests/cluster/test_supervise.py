"""The supervisor, with real processes: what it starts again, what it waits for, when it gives up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch import CHILD, launcher, recording, text, wait_for

from fixtures import PROGRAMS
from tinypod.cluster.launch import Interrupts, run_child
from tinypod.cluster.supervise import supervise
from tinypod.errors import FINAL

ALONE = str(PROGRAMS / "alone.py")


class Supervised:
    """A real process that ends as asked, start for start, and what the supervisor made of it."""

    def __init__(self, folder: Path, *ends: str, **options: object) -> None:
        (folder / "ends").write_text("\n".join(ends))
        self.console, self.waits = recording(), list[float]()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Interrupts, "sleep", lambda _, seconds: self.waits.append(seconds))
            self.code = supervise(
                lambda: run_child(
                    [sys.executable, CHILD, "as_asked", str(folder)], folder / "logs", output=self.console
                ),
                lambda: int((folder / "step").read_text()) if (folder / "step").exists() else None,
                console=self.console,
                **options,  # type: ignore[arg-type]
            )
        self.starts = int((folder / "starts").read_text())
        self.text = text(self.console)


def test_a_crashed_run_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    """The waits double, up to a limit, and begin anew when the run got further."""
    ends = ("- 76", "- 1", "5 kill", "5 75", "5 143", "5 78", "9 1", "9 0")
    run = Supervised(tmp_path, *ends, give_up_after=5, max_wait_s=3.0)
    assert (run.code, run.starts) == (0, 8)
    assert run.waits == [1, 2, 1, 2, 3, 3, 1]
    assert "the process was killed by SIGKILL" in run.text
    assert "ended with exit code 76 before its first step; starting again in 1 s (1 of 5 failures" in run.text
    assert "ended with exit code 137 at step 5; starting again in 1 s" in run.text
    log = (tmp_path / "logs" / "process_0.log").read_text()
    assert log.count("--- ") == 8


@pytest.mark.parametrize(("end", "where"), [("7 76", "at step 7"), ("- 76", "before its first step")])
def test_the_same_step_fails_three_times(tmp_path: Path, end: str, where: str) -> None:
    run = Supervised(tmp_path, *[end] * 5)
    assert (run.code, run.starts, run.waits) == (76, 3, [1, 2])
    assert f"gave up: the run ended 3 times {where}, at last with exit code 76" in run.text


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """Ends with 75 count only after an hour of waiting; a minute here."""
    run = Supervised(tmp_path, *["7 75"] * 20, storage_patience_s=60, max_wait_s=16.0)
    assert run.waits == [1, 2, 4, 8, 16, 16, 16, 16, 16]
    assert (run.code, run.starts) == (75, 10)


def test_a_step_behind_the_furthest_is_no_progress(tmp_path: Path) -> None:
    assert Supervised(tmp_path, "7 76", "6 76", "7 76", "8 0").starts == 3


def test_an_earlier_life_that_was_further_does_not_count(tmp_path: Path) -> None:
    """`--from-step 50` in a run that had come to 200, and that is cut off again and again while it advances."""
    (tmp_path / "step").write_text("200")
    run = Supervised(tmp_path, "70 76", "90 76", "110 76", "130 76", "150 0")
    assert (run.code, run.starts, run.waits) == (0, 5, [1, 1, 1, 1])


def test_kills_do_not_use_up_the_tries_of_a_run(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "7 kill", "7 76", "7 kill", "7 kill", "7 76", "7 kill", "9 0")
    assert (run.code, run.starts) == (0, 7)
    assert run.waits == [1, 2, 4, 8, 16, 32]
    assert "(2 of 3 failures, 4 of 10 kills at this step)" in run.text


def test_kills_at_one_step_end_with_a_hint_at_the_oom_killer(tmp_path: Path) -> None:
    run = Supervised(tmp_path, *["7 kill"] * 20, max_wait_s=16.0)
    assert (run.code, run.starts, run.waits) == (137, 10, [1, 2, 4, 8, 16, 16, 16, 16, 16])
    assert "gave up: the run ended 10 times at step 7, at last with exit code 137" in run.text
    assert "the kernel's OOM killer may be the reason" in run.text


def test_a_bucket_that_is_not_there_is_reported_once_and_at_once(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "- 2", "- 0")
    assert (run.code, run.starts, run.waits) == (2, 1, [])
    assert run.text.count("no such bucket") == 1


@pytest.mark.parametrize("code", sorted(FINAL))
def test_some_ends_are_final(tmp_path: Path, code: int) -> None:
    run = Supervised(tmp_path, f"3 {code}", "4 0")
    assert (run.code, run.starts, run.waits) == (code, 1, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_waiting_supervisor_at_once(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "ends").write_text("- 76\n- 0")
    with launcher(tmp_path / "logs", 0, CHILD, "as_asked", tmp_path) as process:
        assert process.stdout is not None
        wait_for(lambda: "starting again in 60 s" in process.stdout.readline(), process)
        process.send_signal(number)
        assert process.wait(timeout=300) == 128 + number
    assert (tmp_path / "starts").read_text() == "1"


def test_a_signalled_supervisor_does_not_start_again(tmp_path: Path) -> None:
    (tmp_path / "ends").write_text("- wait\n- 0")
    with launcher(tmp_path / "logs", 0, CHILD, "as_asked", tmp_path) as process:
        wait_for(lambda: (tmp_path / "pid_0").exists(), process)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 143
    assert "saved" in output
    assert "starting again" not in output
    assert (tmp_path / "starts").read_text() == "1"


def children_of(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the child in /proc")
@pytest.mark.parametrize("order", ["supervisor first", "child first", "child, and later the supervisor"])
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_sigterm_to_supervisor_and_child_loses_nothing(tmp_path: Path, order: str, times: int) -> None:
    """systemd, Slurm and Kubernetes tell the whole group; the child then hears of it twice."""
    with launcher(tmp_path / "logs", 0, ALONE, tmp_path) as process:
        wait_for(lambda: (tmp_path / "ready").exists(), process)
        (child,) = children_of(process)
        for _ in range(times):
            if order == "supervisor first":
                process.send_signal(signal.SIGTERM)
            os.kill(child, signal.SIGTERM)
            if order == "child, and later the supervisor":
                wait_for(lambda: (tmp_path / "saving").exists(), process)
            if order != "supervisor first":
                process.send_signal(signal.SIGTERM)
            wait_for(lambda: (tmp_path / "saving").exists(), process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("stopping")  # and then passes it on
        time.sleep(0.3)
        (tmp_path / "release").touch()
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 143, output
    assert (tmp_path / "saved").exists()
    assert "starting again" not in output
