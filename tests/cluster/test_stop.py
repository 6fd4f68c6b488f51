"""Stopping, with real processes: whoever gets the signal, all save, and only a second Ctrl-C skips it."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
from test_startup import cluster, results, wait_for

from fixtures import PROGRAMS
from tinypod.cluster.stop import answer
from tinypod.health.watch import Phase


@contextmanager
def alone(folder: Path, environ: dict[str, str] | None = None) -> Iterator[subprocess.Popen]:
    """A process that waits for a signal, and then saves until `release` is there."""
    command = [sys.executable, str(PROGRAMS / "alone.py"), str(folder)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_for((folder / "ready").exists)
            yield process
        finally:
            process.kill()


def test_alone_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """Started at once although the TPU's library is there: without a TPU nobody asks Google's metadata server."""
    (tmp_path / "libtpu.py").write_text("def get_library_path(): return '/nowhere/libtpu.so'")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "GCE_METADATA_IP": "192.0.2.1"}  # an address that is nobody's
    with alone(tmp_path, environ) as process:
        process.send_signal(signal.SIGINT)
        wait_for((tmp_path / "saving").exists)
        assert (tmp_path / "saving").read_text() == "1 SIGINT"
        assert process.stdout is not None
        assert process.stdout.readline() == "said: stopping; Ctrl-C again ends at once\n"
        process.send_signal(signal.SIGTERM)  # does not count as the second one
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 130
    assert not (tmp_path / "saved").exists()


def test_alone_sigterm_never_skips_the_save(tmp_path: Path) -> None:
    """However often it comes: before the save, in it, and after it, until the process has ended by itself."""
    (tmp_path / "linger").touch()
    with alone(tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        wait_for((tmp_path / "saving").exists)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
        process.send_signal(signal.SIGINT)  # the first of its kind
        (tmp_path / "release").touch()
        wait_for((tmp_path / "left").exists)
        process.send_signal(signal.SIGTERM)
        (tmp_path / "linger").unlink()
        assert process.wait(timeout=300) == 143
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("phase", get_args(Phase))
def test_in_every_phase_the_answer_says_what_is_waited_for_and_what_would_be_lost(phase: str) -> None:
    assert re.fullmatch(r"(stopping|ending) .+; Ctrl-C again ends at once and loses nothing", answer(phase, 100, 100))
    assert answer(phase, 1_120, 1_100).endswith("; Ctrl-C again ends at once and loses what came after step 1,100")


@pytest.mark.parametrize(
    ("number", "receivers"),
    [(signal.SIGTERM, [1]), (signal.SIGTERM, [0, 1, 2]), pytest.param(signal.SIGINT, [2], marks=pytest.mark.slow)],
)
def test_a_signal_to_any_stops_all_at_the_same_turn(tmp_path: Path, number: int, receivers: list[int]) -> None:
    """At a random moment, although Orbax asks JAX's preemption service with numbers of its own."""
    moment = random.randrange(3, 60)
    with cluster("loop", tmp_path, 3) as processes:
        turns = tmp_path / "turns_0"
        wait_for(lambda: turns.exists() and int(turns.read_text() or 0) >= moment)
        for index in receivers:
            processes[index].send_signal(number)
        ends = results(processes)
    assert [code for code, _ in ends] == [143] * 3, ends
    last = [re.findall(r"stopped by SIGTERM after turn (\d+)", output) for _, output in ends]
    assert last[0], ends
    assert last[0] == last[1] == last[2]
    assert int(last[0][0]) >= moment


def test_a_sigterm_that_comes_while_all_save_changes_nothing(tmp_path: Path) -> None:
    """The signal reaches the hosts of a pod one after the other."""
    (tmp_path / "linger").touch()
    with cluster("loop", tmp_path, 2, indices=(0, 1)) as processes:
        wait_for(lambda: (tmp_path / "turns_0").exists())
        processes[0].send_signal(signal.SIGTERM)
        wait_for(lambda: len(list(tmp_path.glob("saving_*"))) == 2)
        processes[1].send_signal(signal.SIGTERM)
        (tmp_path / "linger").unlink()
        assert [process.wait(timeout=300) for process in processes] == [143, 143]
