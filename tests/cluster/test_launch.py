"""Local clusters of real processes: how they end, together, whatever ends them."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fixtures import PROGRAMS
from tinypod.cluster.launch import cluster_environment, launch, run_child

CHILD, CLUSTER, LAUNCHER = (str(PROGRAMS / name) for name in ("child.py", "cluster.py", "launcher.py"))


def wait_for(condition: Callable[[], object], process: subprocess.Popen | None = None, timeout_s: float = 300) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert process is None or process.poll() is None, f"it ended early: {process.communicate()[0]}"
        assert time.monotonic() < end, "it never came to it"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended; whoever adopted it has not looked yet


def recording() -> Console:
    return Console(file=StringIO(), width=200)


def text(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@contextmanager
def launcher(*arguments: object) -> Iterator[subprocess.Popen]:
    """A launcher that the test may send signals to."""
    command = [sys.executable, LAUNCHER, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_child_is_told_which_process_it_is() -> None:
    environ = {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8 --b", "JAX_PLATFORMS": "tpu", "HOME": "/h"}
    assert cluster_environment(environ, "127.0.0.1:1234", 4, 2, 3) == {
        "HOME": "/h",
        "XLA_FLAGS": "--a=1 --b",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "3",
        "NPROC": "16",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:1234",
        "TINYPOD_COORDINATOR": "127.0.0.1:1234",
        "TINYPOD_NUM_PROCESSES": "4",
        "TINYPOD_PROCESS_ID": "2",
    }


def test_lines_are_shown_with_their_process_and_logged_without(tmp_path: Path) -> None:
    for _ in range(2):
        console = recording()
        assert launch([sys.executable, CHILD, "show"], 2, 1, tmp_path / "logs", output=console) == 0
    shown = [f"[{i}] {line}" for i in range(2) for line in (f"I am {i} of 2: ✓ [bold]", "no end of line", "to stderr")]
    assert sorted(text(console).splitlines()) == sorted(shown)
    log = (tmp_path / "logs" / "process_1.log").read_text()
    assert len(re.findall(r"(?m)^--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, pid \d+$", log)) == 2
    assert log.count("I am 1 of 2: ✓ [bold]\n") == 2
    assert log.count("[Gloo]") == 6


def test_one_process_has_no_prefix(tmp_path: Path) -> None:
    console = recording()
    assert run_child([sys.executable, CHILD, "show"], tmp_path, output=console) == 0
    assert text(console) == "I am 0 of None: ✓ [bold]\nto stderr\nno end of line\n"
    assert "to stderr" in (tmp_path / "process_0.log").read_text()


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (1, 76)])
def test_all_end_with_the_first_that_fails(tmp_path: Path, code: int, expected: int) -> None:
    """An uncaught error gives way to one that says what happened; the deaf ones are killed after their grace."""
    console = recording()
    command = [sys.executable, CHILD, f"one_fails={code}", str(tmp_path)]
    assert launch(command, 4, 1, tmp_path, output=console, grace_s=3.0) == expected
    assert "[2] process 1 is gone" in text(console)
    assert f"process 1 ended with exit code {code}" in text(console)
    assert "; ended the other 2; each one's output is in" in text(console)


def test_what_all_say_is_said_once(tmp_path: Path) -> None:
    """The same error of three processes is one message; what one of them alone says is shown, too."""
    program = tmp_path / "fails.py"
    program.write_text(
        "import os, sys\n"
        "number = os.environ['TINYPOD_PROCESS_ID']\n"
        "print('I am here')\n"
        "print('error: demo:\\n  steps: expected greater than 0')\n"
        "print(f'  only {number}')\n"
        "sys.exit(2)\n"
    )
    console = recording()
    assert launch([sys.executable, str(program)], 3, 1, tmp_path / "logs", output=console, grace_s=300) == 2
    shown = text(console)
    assert shown.count("I am here") == 3
    assert shown.count("error: demo:") == shown.count("steps: expected greater than 0") == 1
    assert all(f"[{number}]   only {number}" in shown for number in range(3))
    assert f"all 3 processes ended with exit code 2; each one's output is in {tmp_path / 'logs'}" in shown
    assert all("error: demo:" in log.read_text() for log in (tmp_path / "logs").iterdir())


def test_a_killed_process_is_named_and_ends_the_others(tmp_path: Path) -> None:
    with launcher(tmp_path / "logs", 3, CLUSTER, "loop", tmp_path, 300) as process:
        wait_for(lambda: (tmp_path / "turns_0").exists(), process)
        pids = [int(re.findall(r"pid (\d+)", log.read_text())[0]) for log in sorted((tmp_path / "logs").iterdir())]
        os.kill(pids[2], signal.SIGKILL)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + signal.SIGKILL
    assert "process 2 was killed by SIGKILL" in output
    assert not any(map(is_running, pids))


def test_a_failure_keeps_its_exit_code(tmp_path: Path) -> None:
    """JAX's shutdown barrier would make it an abort of all, after its timeout."""
    console = recording()
    assert (
        launch([sys.executable, CLUSTER, "ended", str(tmp_path), "300"], 2, 1, tmp_path, output=console, grace_s=0)
        == 79
    )
    assert "process 1 ended with exit code 79; ended the other 1" in text(console)


def test_ctrl_c_stops_a_cluster_at_the_same_turn(tmp_path: Path) -> None:
    with launcher(tmp_path / "logs", 3, CLUSTER, "loop", tmp_path, 300) as process:
        wait_for(lambda: (tmp_path / "turns_0").exists(), process)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + signal.SIGINT
    assert "stopping: waiting for a last checkpoint" in output
    ends = re.findall(r"\[(\d)\] stopped by SIGTERM after turn (\d+)", output)
    assert sorted(index for index, _ in ends) == ["0", "1", "2"]
    assert len({turn for _, turn in ends}) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once(tmp_path: Path, number: signal.Signals) -> None:
    with launcher(tmp_path / "logs", 2, CHILD, "waits", tmp_path) as process:
        wait_for(lambda: len(list(tmp_path.glob("pid_*"))) == 2, process)
        process.send_signal(number)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + number
    assert output.count("saved") == 2


def test_a_second_ctrl_c_ends_the_deaf(tmp_path: Path) -> None:
    """Told at once what is waited for, and what a second one does."""
    with launcher(tmp_path / "logs", 2, CHILD, "deaf", tmp_path) as process:
        wait_for(lambda: len(list(tmp_path.glob("pid_*"))) == 2, process)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping: waiting for a last checkpoint\n"
        assert process.stdout.readline() == "Ctrl-C once more ends it at once, without one\n"
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 130
    assert "ending at once" in output
    assert not any(is_running(int(path.read_text())) for path in tmp_path.glob("pid_*"))


def test_sigterm_to_the_launcher_never_kills_children_that_save(tmp_path: Path) -> None:
    with launcher(tmp_path / "logs", 2, CHILD, "saves_long", tmp_path) as process:
        wait_for(lambda: len(list(tmp_path.glob("pid_*"))) == 2, process)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: len(list(tmp_path.glob("saving_*"))) == 2, process)
            time.sleep(0.3)  # longer than the launcher needs to see it
        assert process.poll() is None
        (tmp_path / "release").touch()
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 143
    assert output.count("saved") == 2
    assert "ending at once" not in output


def test_sigterm_to_a_launcher_and_its_cluster_at_once(tmp_path: Path) -> None:
    """Each process hears of it from outside and from its launcher, before the save and in it."""
    (tmp_path / "linger").touch()
    with launcher(tmp_path / "logs", 2, CLUSTER, "loop", tmp_path, 300) as process:
        wait_for(lambda: len(list(tmp_path.glob("turns_*"))) == 2, process)
        logs = sorted((tmp_path / "logs").iterdir())
        pids = [process.pid, *(int(re.findall(r"pid (\d+)", log.read_text())[0]) for log in logs)]
        for _ in range(2):
            for pid in random.sample(pids, 3):
                os.kill(pid, signal.SIGTERM)
            wait_for(lambda: len(list(tmp_path.glob("saving_*"))) == 2, process)
        (tmp_path / "linger").unlink()
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 143, output
    assert len(set(re.findall(r"stopped by SIGTERM after turn (\d+)", output))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    with launcher(tmp_path / "logs", 3, CHILD, "deaf", tmp_path) as process:
        wait_for(lambda: len(list(tmp_path.glob("pid_*"))) == 3, process)
        pids = [int(path.read_text()) for path in tmp_path.glob("pid_*")]
        assert all(map(is_running, pids))
        process.kill()
        wait_for(lambda: not any(map(is_running, pids)), timeout_s=100)
