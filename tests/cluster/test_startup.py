"""Start-up and agreement, with real processes; the roll call also in threads, where its odd guests come."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from fixtures import PROGRAMS
from tinypod.cluster import startup
from tinypod.cluster.agreement import Cluster
from tinypod.cluster.launch import cluster_environment, free_port
from tinypod.cluster.startup import ClusterSettings, settings_from
from tinypod.errors import ConfigError, DeadlineError


def wait_for(condition: Callable[[], object], timeout_s: float = 300) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came to it"
        time.sleep(0.01)


@contextmanager
def cluster(
    action: str, folder: Path, count: int, indices: tuple[int, ...] = (0, 1, 2), timeout_s: float = 300
) -> Iterator[list[subprocess.Popen]]:
    """Processes of a cluster, all of them or some, with nobody above them."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(PROGRAMS / "cluster.py"), action, str(folder), str(timeout_s)]
    processes = [
        subprocess.Popen(
            command,
            env=cluster_environment(os.environ, address, count, index, 2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in indices
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def results(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


ENVIRON = {"TINYPOD_COORDINATOR": "host:1234", "TINYPOD_NUM_PROCESSES": "4", "TINYPOD_PROCESS_ID": "3"}


def test_flags_win_over_the_environment() -> None:
    assert settings_from(None, None, None, {}) is None
    assert settings_from(None, None, None, ENVIRON) == ClusterSettings("host:1234", 4, 3)
    assert settings_from("[::1]:80", 2, 0, ENVIRON) == ClusterSettings("[::1]:80", 2, 0)
    assert settings_from(None, 1, None, {}) == ClusterSettings(None, 1, 0)


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (("host:1", None, None), {}, "missing: --num-processes or TINYPOD_NUM_PROCESSES and --process-id"),
        ((None, 2, 0), {}, "missing: --coordinator or TINYPOD_COORDINATOR$"),
        (("host:1", 2, None), {}, "missing: --process-id or TINYPOD_PROCESS_ID$"),
        ((None, None, 4), ENVIRON, "--process-id 4: expected 0 to 3, because there are 4"),
        ((None, None, -1), ENVIRON, "--process-id -1: expected 0 to 3"),
        ((None, 0, None), ENVIRON, "--num-processes 0: expected at least 1"),
        (("host", None, None), ENVIRON, "--coordinator host: expected HOST:PORT"),
        (("host:70000", None, None), ENVIRON, "--coordinator host:70000: expected HOST:PORT"),
        ((None, None, None), {**ENVIRON, "TINYPOD_PROCESS_ID": "two"}, "TINYPOD_PROCESS_ID=two: expected a whole"),
    ],
)
def test_settings_that_cannot_work(flags: tuple, environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_from(*flags, environ)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[03-06]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
}


def test_slurm_is_detected_and_a_lone_process_is_not_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert startup.detect(1) is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # any pod has it; JAX alone would warn, or query
    assert startup.detect(1) is None
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert startup.detect(1) == ClusterSettings("node03:61447", 4, 2, (1,))
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert startup.detect(1) is None
    assert startup.start(None, 1, 1) == Cluster(0, 1)


def test_alone_everything_is_agreed() -> None:
    alone = Cluster()
    assert alone.is_primary
    assert alone.broadcast("name", "value", 0) == "value"
    alone.barrier("name", 0)
    alone.shutdown(0)


def test_three_start_compute_and_agree(tmp_path: Path) -> None:
    with cluster("total", tmp_path, 3) as processes:
        for index, (code, output) in enumerate(results(processes)):
            assert code == 0, output
            assert f"{index} of 3: sum 12 on 6 devices" in output
            assert re.findall("agreed (.*)", output) == [f"{turn}/0 with = and ✓" for turn in range(50)]


def test_those_that_came_name_the_missing(tmp_path: Path) -> None:
    (tmp_path / "together").touch()
    with cluster("total", tmp_path, 5, indices=(0, 1, 3), timeout_s=5) as processes:
        wait_for(lambda: len(list(tmp_path.glob("here_*"))) == 3)
        (tmp_path / "go").touch()
        for code, output in results(processes):
            assert code == 76, output
            assert "3 of 5 processes came within 5 s; missing: process 2, process 4. Start all 5 with" in output


def test_a_barrier_names_who_did_not_come(tmp_path: Path) -> None:
    with cluster("late", tmp_path, 3) as processes:
        *waiting, _ = results(processes)
        for code, output in waiting:
            assert code == 76, output
            assert "2 of 3 processes came to `meeting` within 5 s; missing: process 2." in output


# The roll call, with whatever else may find the port.


class RollCall:
    """Process 0 of three, in a thread."""

    def __init__(self, timeout_s: float) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.settings = [ClusterSettings(address, 3, index) for index in range(3)]
        self.address = startup.split_address(address)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._call, args=(timeout_s,))
        self.thread.start()

    def _call(self, timeout_s: float) -> None:
        try:
            startup._call_the_roll(self.settings[0], timeout_s)
        except DeadlineError as error:
            self.error = error

    def connect(self) -> socket.socket:
        end = time.monotonic() + 100
        while True:
            try:
                return socket.create_connection(self.address, timeout=100)
            except ConnectionRefusedError:
                assert time.monotonic() < end
                time.sleep(0.01)


def test_strangers_do_not_disturb_the_roll_call() -> None:
    roll = RollCall(200)
    with roll.connect() as silent, roll.connect() as stranger, roll.connect() as web:
        stranger.sendall(b"\x00\xff\n")
        web.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert web.recv(100) == b""
        other = threading.Thread(target=startup._answer_the_roll, args=(roll.settings[2], 200))
        other.start()
        startup._answer_the_roll(roll.settings[1], 200)
        other.join()
        roll.thread.join()
        assert roll.error is None
        assert silent.recv(100) == b""


def test_a_process_id_that_is_taken_and_a_count_that_differs() -> None:
    roll = RollCall(200)
    first = threading.Thread(target=startup._answer_the_roll, args=(roll.settings[1], 200))
    with roll.connect() as same:
        same.sendall(b'{"process": 1, "count": 3, "patience_s": 200}')
        # Its place is taken once the one behind it in the queue was refused.
        with pytest.raises(ConfigError, match="--process-id 1 is taken; every process needs its own, from 0 to 2"):
            startup._answer_the_roll(roll.settings[1], 200)
        wrong = ClusterSettings(roll.settings[0].coordinator, 4, 2)
        with pytest.raises(ConfigError, match="process 0 was started with --num-processes 3, process 2 with 4"):
            startup._answer_the_roll(wrong, 200)
    first.start()  # the place of one that left is free again
    startup._answer_the_roll(roll.settings[2], 200)
    first.join()
    roll.thread.join()
    assert roll.error is None


def test_the_least_patient_process_ends_the_wait_for_all() -> None:
    roll = RollCall(600)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="2 of 3 processes came within 3 s; missing: process 2"):
        startup._answer_the_roll(roll.settings[1], 3)
    roll.thread.join()
    assert isinstance(roll.error, DeadlineError)
    assert time.monotonic() - began < 300


def test_process_0_is_missing() -> None:
    settings = ClusterSettings(f"127.0.0.1:{free_port()}", 3, 2)
    with pytest.raises(DeadlineError, match=r"process 2: process 0 did not answer at 127.0.0.1:\d+ within 0.5 s"):
        startup._answer_the_roll(settings, 0.5)


def test_a_port_that_is_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        settings = ClusterSettings(f"127.0.0.1:{holder.getsockname()[1]}", 2, 0)
        with pytest.raises(DeadlineError, match=r"process 0 cannot listen on port \d+.*: Address already in use"):
            startup._call_the_roll(settings, 0.3)
