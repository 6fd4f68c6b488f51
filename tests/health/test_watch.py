"""Phases and deadlines, with real threads, real processes and real signals."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from test_heartbeat import beat

from tinypod.experiment import HealthConfig
from tinypod.health import watch as module
from tinypod.health.goodput import read_attempts
from tinypod.health.heartbeat import read_heartbeats, write_heartbeat
from tinypod.health.ledger import Ledger
from tinypod.health.watch import Health, deadline

FAST = HealthConfig(
    heartbeat_s=0.2,
    start_timeout_s=60.0,
    restore_timeout_s=60.0,
    compile_timeout_s=60.0,
    step_timeout_s=1.0,
    evaluate_timeout_s=60.0,
    save_timeout_s=60.0,
    close_timeout_s=60.0,
)


@pytest.fixture
def exit_codes(monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[int]":
    """What the process would have ended with."""
    codes: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", codes.put)
    return codes


PREAMBLE = f"""
import os, sys, threading, time
from pathlib import Path
from tinypod.experiment import HealthConfig
from tinypod.health import watch as module
from tinypod.health.watch import Health
folder, process, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = HealthConfig(**{FAST.model_dump()!r})
"""


@contextlib.contextmanager
def child(folder: Path, body: str, process: int = 0, count: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `body`; killed at the end if it is still there."""
    command = [sys.executable, "-c", PREAMBLE + body, str(folder), str(process), str(count)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)


# Heartbeats


def test_a_heartbeat_says_what_the_process_does(tmp_path):
    with Health(tmp_path, 2, 4, FAST) as health:
        (first,) = read_heartbeats(tmp_path)
        assert (first.process, first.count, first.phase, first.ended) == (2, 4, "starting", None)
        assert (first.host, first.pid) == (socket.gethostname(), os.getpid())
        with health.phase("evaluating"):
            health.beat(7)
            health.timed(10, 0.5)
            wait_for(lambda: read_heartbeats(tmp_path)[0].step == 7, "the next heartbeat")
            (second,) = read_heartbeats(tmp_path)
    assert (second.phase, second.step_ms) == ("evaluating", {"p50": 50.0, "p90": 50.0, "max": 50.0})
    assert second.phase_since >= first.phase_since
    assert read_heartbeats(tmp_path)[0].ended == "done"


def test_percentiles_are_of_the_last_samples(tmp_path):
    health = Health(tmp_path, config=FAST)
    for ms in [9999] * 50 + list(range(1, 201)):
        health.timed(1, ms / 1000)
    assert health._heartbeat().step_ms == {"p50": 100.0, "p90": 180.0, "max": 200.0}


@pytest.mark.parametrize(
    ("error", "announced", "ended"),
    [
        (None, None, "done"),
        (None, "stopped: SIGTERM", "stopped: SIGTERM"),
        (KeyboardInterrupt(), None, "stopped: SIGINT"),
        (RuntimeError("first line\nsecond"), None, "failed: first line"),
        (RuntimeError("while saving"), "stopped: SIGTERM", "failed: while saving"),
        (RuntimeError(), None, "failed: RuntimeError"),
    ],
)
def test_how_it_ended(tmp_path, error, announced, ended):
    threads = threading.active_count()
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), Health(tmp_path, config=FAST) as health:
        if announced:
            health.ends(announced)
        if error:
            raise error
    assert read_heartbeats(tmp_path)[0].ended == ended
    assert threading.active_count() == threads


def test_an_end_that_is_announced_has_not_come_yet(tmp_path):
    with Health(tmp_path, config=FAST) as health:
        health.ends("stopped: SIGTERM")
        health.beat(1)
        wait_for(lambda: read_heartbeats(tmp_path)[0].step == 1, "the next heartbeat")
        assert read_heartbeats(tmp_path)[0].ended is None


def test_processes_of_an_earlier_larger_start_are_forgotten(tmp_path):
    for process in (0, 1, 2, 10):
        with Health(tmp_path, process, 11, FAST):
            pass
    with Health(tmp_path, 0, 2, FAST) as health:
        health.begin(0)
        assert [b.process for b in read_heartbeats(tmp_path)] == [0, 1]


def test_copies_go_to_the_object_store_now_and_then(tmp_path):
    published: list[tuple[str, bytes]] = []
    with Health(tmp_path / "health", 3, 4, FAST, publish=lambda *copy: published.append(copy)) as health:
        health.beat(5)
        wait_for(lambda: read_heartbeats(tmp_path / "health")[0].step == 5, "the next heartbeat")
        assert [name for name, _ in published] == ["health/process_3.json"]
    assert len(published) == 2  # at the start and at the end
    assert json.loads(published[-1][1])["ended"] == "done"


def test_the_ledger_goes_to_the_object_store_with_it(tmp_path):
    published: dict[str, bytes] = {}
    with Health(tmp_path / "health", config=FAST, ledger=Ledger(tmp_path), publish=published.__setitem__) as health:
        assert "goodput.json" not in published
        health.begin(0)
    assert json.loads(published["goodput.json"])["attempts"][0]["ended"] is not None


def test_what_cannot_be_written_is_reported_once(tmp_path, caplog, monkeypatch):
    tried = threading.Semaphore(0)

    def full(*_: object) -> None:
        tried.release()
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "write_heartbeat", full)
    with Health(tmp_path, 3, 4, FAST):
        for _ in range(3):
            assert tried.acquire(timeout=30)
    assert caplog.text.count("No space left") == 1
    assert "process 3" in caplog.text


# Before training resumes


def begun(folder: Path, step: int, error: Exception | None = None) -> None:
    """A whole start of a run, with its ledger."""
    with contextlib.suppress(RuntimeError), Health(folder / "health", 0, 2, FAST, Ledger(folder)) as health:
        health.begin(step)
        if error is not None:
            raise error


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*.json"))}


@pytest.mark.parametrize("error", [None, RuntimeError("no such host")])
def test_a_start_that_does_not_begin_leaves_a_finished_run_as_it_was(tmp_path, error):
    begun(tmp_path, 8)
    write_heartbeat(tmp_path / "health", beat(1, ended="done"))
    before = files(tmp_path)
    with contextlib.suppress(RuntimeError), Health(tmp_path / "health", 0, 1, FAST, Ledger(tmp_path)) as health:
        time.sleep(2 * FAST.heartbeat_s)
        health.ends("stopped: SIGTERM")
        if error is not None:
            raise error
    assert files(tmp_path) == before


def test_a_finished_run_is_seen_again_once_it_resumes(tmp_path):
    begun(tmp_path, 8)
    write_heartbeat(tmp_path / "health", beat(2, ended="done"))
    with Health(tmp_path / "health", 0, 2, FAST, Ledger(tmp_path)) as health:
        assert read_heartbeats(tmp_path / "health")[0].ended == "done"
        health.begin(9)
        assert [(b.process, b.step, b.ended) for b in read_heartbeats(tmp_path / "health")] == [(0, 9, None)]
        health.beat(10)
        wait_for(lambda: read_heartbeats(tmp_path / "health")[0].step == 10, "the next heartbeat")
    assert [attempt.first_step for attempt in read_attempts(tmp_path)] == [8, 9]


def test_any_other_start_is_seen_at_once_but_has_no_ledger_yet(tmp_path):
    for _ in range(2):  # the first start, and one after a failure
        before = files(tmp_path).get(str(tmp_path / "goodput.json"))
        with contextlib.suppress(RuntimeError), Health(tmp_path / "health", 0, 2, FAST, Ledger(tmp_path)):
            (now,) = read_heartbeats(tmp_path / "health")
            assert (now.phase, now.ended) == ("starting", None)
            raise RuntimeError("no such host")
        assert read_heartbeats(tmp_path / "health")[0].ended == "failed: no such host"
        assert files(tmp_path).get(str(tmp_path / "goodput.json")) == before
        begun(tmp_path, 3, RuntimeError("out of memory"))


def test_a_finished_run_is_known_from_the_object_store(tmp_path):
    published: list[str] = []

    def fetch() -> None:
        tmp_path.mkdir(exist_ok=True)
        write_heartbeat(tmp_path, beat(1, ended="done"))

    with Health(tmp_path, 1, 2, FAST, publish=lambda name, _: published.append(name), fetch=fetch):
        pass
    assert published == []
    assert read_heartbeats(tmp_path)[0].ended == "done"


def test_a_deadline_before_a_finished_run_resumes_blames_nobody(tmp_path, capfd, exit_codes):
    for process in range(2):
        write_heartbeat(tmp_path, beat(process, ended="done"))
    before = files(tmp_path)
    with Health(tmp_path, 0, 2, short("starting")) as health:
        assert exit_codes.get(timeout=30) == 76
        health._watcher.join()
        assert "suspect: not known" in health.lost_contact(RuntimeError())
    assert "suspect: not known" in capfd.readouterr().err
    assert files(tmp_path) == before


# Phases


def test_the_ledger_counts_inner_phases_once(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tinypod.health.ledger.time", SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0]))
    ledger = Ledger(tmp_path)
    health = Health(tmp_path / "health", config=FAST, ledger=ledger)

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    pass_time(1)
    health.begin(0)
    with health.phase("stepping"):
        pass_time(10)
        with health.phase("evaluating"):
            pass_time(100)
            with contextlib.suppress(KeyError), health.phase("saving"):
                pass_time(1000)
                raise KeyError
            assert health.current == "evaluating"
            pass_time(200)
        with health.phase("waiting"):
            pass_time(3)
        pass_time(20)
    with health.phase("closing"):
        pass_time(4)
    assert health.current == "starting"
    ledger.end("done", 0)
    seconds = {"starting": 1, "stepping": 30, "evaluating": 300, "saving": 1000, "waiting": 3, "closing": 4}
    assert read_attempts(tmp_path)[0].seconds == seconds


def test_the_ledger_ends_as_the_process_does(tmp_path):
    with contextlib.suppress(RuntimeError), Health(tmp_path / "health", config=FAST, ledger=Ledger(tmp_path)) as health:
        health.begin(4)
        with health.phase("stepping"):
            health.beat(6)
        health.rolled_back(6, 5)
        raise RuntimeError("why")
    (attempt,) = read_attempts(tmp_path)
    assert (attempt.ended, attempt.last_step, attempt.steps_done) == ("failed: why", 5, 2)


# Deadlines


def short(phase: str, seconds: float = 0.4) -> HealthConfig:
    return FAST.model_copy(update={"heartbeat_s": 0.1, module._TIMEOUTS[phase]: seconds})


@pytest.mark.parametrize("phase", list(module._TIMEOUTS))
def test_every_phase_has_a_deadline(tmp_path, capfd, exit_codes, phase):
    with Health(tmp_path, config=short(phase)) as health:
        with health.phase(phase):
            health.beat(3)
            assert exit_codes.get(timeout=30) == 76
        health._watcher.join()
    assert exit_codes.empty()
    text = capfd.readouterr().err
    assert f"has been {phase} at step 3" in text
    assert f"health.{module._TIMEOUTS[phase]}=0.4 has passed" in text
    assert "test_every_phase_has_a_deadline" in text  # the stack
    assert "test_every_phase_has_a_deadline" in (tmp_path / "process_0.stack.txt").read_text()


@pytest.mark.parametrize(("phase", "seconds"), [("stepping", 300), ("closing", 1800), ("waiting", 2000 + 60)])
def test_how_long_a_phase_may_last(tmp_path, monkeypatch, phase, seconds):
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now[0]))
    health = Health(tmp_path, config=HealthConfig(restore_timeout_s=2000.0))
    with health.phase("stepping"), health.phase(phase):
        assert not health._is_late(phase)  # sees the beat of the new phase
        for _ in range(seconds - 1):
            now[0] += 1
            assert not health._is_late(phase)
        now[0] += 1
        assert health._is_late(phase)
        health.beat()
        assert not health._is_late(phase)


def test_a_wait_for_the_others_names_the_longest_timeout(tmp_path, capfd, exit_codes):
    config = HealthConfig(evaluate_timeout_s=3000.0)
    assert deadline(config, "waiting") == (3060.0, "evaluate_timeout_s")
    health = Health(tmp_path, config=config)
    with health.phase("waiting"):
        health._expire("waiting")
    assert exit_codes.get() == 76
    assert "health.evaluate_timeout_s=3000 has passed" in capfd.readouterr().err


def test_a_beat_or_a_new_phase_starts_the_clock_anew(tmp_path, monkeypatch):
    exited = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: exited.set())
    with Health(tmp_path, config=short("stepping", 1.0)) as health:
        with health.phase("stepping"):
            for step in range(20):  # twice the deadline
                health.beat(step)
                assert not exited.wait(0.1)
        for _ in range(20):
            with health.phase("stepping"):
                assert not exited.wait(0.1)
        with health.phase("stepping"):
            with health.phase("evaluating"):  # which has more time
                assert not exited.wait(1.5)
            assert exited.wait(30)


def test_blocked_in_a_lock(tmp_path):
    body = """
with Health(folder, process, count, config) as health, health.phase("stepping"):
    health.beat(41)
    lock = threading.Lock()
    lock.acquire()
    def wait_for_ever():
        lock.acquire()
    wait_for_ever()
"""
    with child(tmp_path, body) as running:
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (76, "")
    host = socket.gethostname()
    assert f"error: process 0 (host {host}, pid {running.pid}) has been stepping at step 41" in err
    assert "suspect: this process itself" in err
    assert "in wait_for_ever" in err
    assert "Run it again to resume" in err
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.ended, beat.step) == ("failed: deadline", 41)


def test_blocked_in_the_runtime(tmp_path):
    body = """
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
def hang(x):
    time.sleep(3600)
    return x
scalar = jax.ShapeDtypeStruct((), np.float32)
compiled = jax.jit(lambda x: jax.pure_callback(hang, scalar, x)).lower(scalar).compile()
with Health(folder, process, count, config) as health, health.phase("stepping"):
    def fetch():
        return jax.device_get(compiled(np.float32(1)))
    fetch()
"""
    with child(tmp_path, body) as running:
        out, err = running.communicate(timeout=120)
    assert (running.returncode, out) == (76, ""), err
    assert "in fetch" in err
    assert "in hang" in err


def test_a_file_system_that_hangs_cannot_stop_the_end(tmp_path):
    body = """
module._LAST_WORDS_S = 0.5
with Health(folder, process, count, config) as health, health.phase("stepping"):
    stuck = lambda *_: time.sleep(3600)
    module.write_heartbeat = module.read_heartbeats = stuck
    stuck()
"""
    with child(tmp_path, body) as running:
        _, err = running.communicate(timeout=60)
    assert running.returncode == 76
    assert "health.step_timeout_s=1 has passed" in err


IN_STEP = """
def steps_of(i):
    try:
        return int((folder / f"at_{i}").read_text() or -1)
    except FileNotFoundError:
        return -1

with Health(folder / "health", process, count, config) as health:
    while any(not (folder / f"at_{i}").exists() for i in range(count)):
        (folder / f"at_{process}").write_text("0")
        time.sleep(0.01)
    with health.phase("stepping"):
        for step in range(1, 100000):
            temporary = folder / f"tmp_{process}"
            temporary.write_text(str(step))
            os.replace(temporary, folder / f"at_{process}")
            while any(steps_of(i) < step for i in range(count)):
                time.sleep(0.002)
            health.beat(step)
"""


def test_a_stopped_process_is_named_by_the_other(tmp_path):
    with child(tmp_path, IN_STEP, 0, 2) as waiting, child(tmp_path, IN_STEP, 1, 2) as stopped:
        folder = tmp_path / "health"
        wait_for(lambda: [b.step > 0 for b in read_heartbeats(folder)] == [True, True], "both to step")
        stopped.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        _, err = waiting.communicate(timeout=60)
        assert time.monotonic() - began < 10
        assert waiting.returncode == 76
        host = socket.gethostname()
        assert f"suspect: process 1 (host {host}, pid {stopped.pid}) has been silent for" in err
        assert "it was stepping at step" in err
        assert err.count("suspect:") == 1


def test_a_killed_process_is_named_by_the_other(tmp_path):
    with child(tmp_path, IN_STEP, 0, 2) as waiting, child(tmp_path, IN_STEP, 1, 2) as killed:
        folder = tmp_path / "health"
        wait_for(lambda: [b.step > 0 for b in read_heartbeats(folder)] == [True, True], "both to step")
        killed.kill()
        killed.wait()
        _, err = waiting.communicate(timeout=60)
        assert waiting.returncode == 76
        assert f"pid {killed.pid}) is gone (no such process)" in err


def test_a_frozen_process_did_not_hang(tmp_path):
    """SIGSTOP for longer than the deadline, then SIGCONT: it continues. A hang after that is still found."""
    body = """
config = config.model_copy(update={"step_timeout_s": 1.5})
with Health(folder, process, count, config) as health, health.phase("stepping"):
    for step, line in enumerate(sys.stdin, 1):
        health.beat(step)
        print(step, flush=True)
        if line == "hang\\n":
            time.sleep(3600)
"""
    with child(tmp_path, body) as running:
        assert running.stdin is not None
        assert running.stdout is not None

        def say(text: str) -> str:
            running.stdin.write(text + "\n")
            running.stdin.flush()
            return running.stdout.readline()

        assert say("go") == "1\n"
        written = [time.time()]
        for _ in range(2):  # heartbeats: by then the watching thread has seen the beat, and its clock runs

            def is_newer() -> bool:
                (beat,) = read_heartbeats(tmp_path)
                return beat.time > written[-1] and beat.step == 1

            wait_for(is_newer, "a heartbeat")
            written.append(read_heartbeats(tmp_path)[0].time)
        running.send_signal(signal.SIGSTOP)
        time.sleep(3)  # two deadlines: what the test is about
        running.send_signal(signal.SIGCONT)
        time.sleep(0.3)  # long enough for a wrong clock to fire
        assert say("go") == "2\n", running.stderr.read()
        assert say("hang") == "3\n"
        assert running.wait(60) == 76


# Lost contact


def test_a_failure_of_all_names_the_one_that_is_gone(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        gone = ended.pid
    with Health(tmp_path, 1, 3, FAST) as health:
        others = [
            beat(0, host="h", time=time.time() + 60),
            beat(2, host=socket.gethostname(), pid=gone, time=time.time()),
        ]
        for other in others:
            write_heartbeat(tmp_path, other)
        health.beat(42)
        text = health.lost_contact(RuntimeError("Gloo: connection reset\nby peer"))
    host = socket.gethostname()
    assert text.splitlines() == [
        f"a computation over all processes failed at step 42 in process 1 (host {host}, pid {os.getpid()}): "
        "Gloo: connection reset",
        f"suspect: process 2 (host {host}, pid {gone}) is gone (no such process); it was stepping at step 41",
        "Run it again to resume from the last checkpoint",
    ]


def test_a_failure_of_all_waits_for_a_silence_to_show_and_no_longer(tmp_path):
    with Health(tmp_path, 0, 2, FAST) as health:
        other = beat(1, time=time.time(), every_s=FAST.heartbeat_s)
        write_heartbeat(tmp_path, other)
        assert "process 1 (host h1, pid 101) has been silent" in health.lost_contact(RuntimeError("reset"))
        other = beat(1, time=time.time() + 60, ended="failed: a computation over all processes failed at step 3")
        write_heartbeat(tmp_path, other)
        assert "suspect: none: all processes are alive" in health.lost_contact(RuntimeError())


# Config


def test_defaults_and_limits():
    assert deadline(HealthConfig(), "compiling") == (1800, "compile_timeout_s")
    with pytest.raises(ValidationError, match=r"heartbeat_s=5.0 must be at most a quarter .* step_timeout_s=2.0"):
        HealthConfig(step_timeout_s=2.0)
    with pytest.raises(ValidationError):
        HealthConfig(step_timeout_s=0.0)
