"""Phases, heartbeats and deadlines, with real threads, real processes and real signals."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from tinypod.health import watch as module
from tinypod.health.goodput import Ledger, read_attempts
from tinypod.health.watch import Health, HealthConfig, Heartbeat, read_heartbeats, suspects

FAST = HealthConfig(
    heartbeat_s=0.2,
    start_timeout_s=60.0,
    restore_timeout_s=60.0,
    compile_timeout_s=60.0,
    step_timeout_s=1.0,
    evaluate_timeout_s=60.0,
    save_timeout_s=60.0,
)
PREAMBLE = f"""
import os, sys, threading, time
from pathlib import Path
from tinypod import health as module
from tinypod.health.watch import Health, HealthConfig
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


def beat(process: int, step: int = 41, age: float = 0.1, **changes) -> Heartbeat:
    values = {"count": 4, "host": f"h{process}", "pid": 100 + process, "phase": "stepping", "every_s": 1.0}
    return Heartbeat(process, **(values | {"step": step, "time": 1000.0 - age} | changes))


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
    assert health._heartbeat(None).step_ms == {"p50": 100.0, "p90": 180.0, "max": 200.0}


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


def test_damaged_heartbeats_say_so(tmp_path):
    with Health(tmp_path, 1, 6, FAST):
        pass
    whole = (tmp_path / "process_1.json").read_text()
    for number, text in {0: "", 2: whole[:30], 3: "[]", 4: whole, 5: '{"process": 5, "step": "x"}'}.items():
        (tmp_path / f"process_{number}.json").write_text(text)
    (tmp_path / "process_1.json.tmp").write_text("{")
    (tmp_path / "process_x.json").write_text("{")
    beats = read_heartbeats(tmp_path)
    assert [b.process for b in beats] == list(range(6))
    assert [b.unreadable is None for b in beats] == [False, True, False, False, False, False]
    assert "step is 'x'" in (beats[5].unreadable or "")
    assert read_heartbeats(tmp_path / "nowhere") == []


def test_a_field_of_a_newer_version_is_no_damage(tmp_path):
    (tmp_path / "process_0.json").write_text(json.dumps({"process": 0, "step": 3, "news": 1}))
    assert read_heartbeats(tmp_path) == [Heartbeat(0, step=3)]


def test_processes_of_an_earlier_larger_start_are_forgotten(tmp_path):
    for process in (0, 1, 2, 10):
        with Health(tmp_path, process, 11, FAST):
            pass
    with Health(tmp_path, 0, 2, FAST):
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
    with Health(tmp_path / "health", config=FAST, ledger=Ledger(tmp_path), publish=published.__setitem__):
        pass
    assert json.loads(published["goodput.json"])["attempts"][0]["ended"] is not None


def test_what_cannot_be_written_is_told_of_once(tmp_path, caplog, monkeypatch):
    tried = threading.Semaphore(0)

    def full(path: Path, data: bytes) -> None:
        tried.release()
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "replace_file", full)
    with Health(tmp_path, 3, 4, FAST):
        for _ in range(3):
            assert tried.acquire(timeout=30)
    assert caplog.text.count("No space left") == 1
    assert "process 3" in caplog.text


# Phases


def test_the_ledger_counts_inner_phases_once(tmp_path):
    now = [0.0]
    ledger = Ledger(tmp_path, clock=lambda: now[0], monotonic=lambda: now[0])
    health = Health(tmp_path / "health", config=FAST, ledger=ledger)

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    pass_time(1)
    with health.phase("stepping"):
        pass_time(10)
        with health.phase("evaluating"):
            pass_time(100)
            with contextlib.suppress(KeyError), health.phase("saving"):
                pass_time(1000)
                raise KeyError
            assert health.current == "evaluating"
            pass_time(200)
        pass_time(20)
    assert health.current == "starting"
    ledger.end("done", 0)
    assert read_attempts(tmp_path)[0].seconds == {"starting": 1, "stepping": 30, "evaluating": 300, "saving": 1000}


def test_the_ledger_ends_as_the_process_does(tmp_path):
    with contextlib.suppress(RuntimeError), Health(tmp_path / "health", config=FAST, ledger=Ledger(tmp_path)) as health:
        assert health.ledger is not None
        health.ledger.begin(4)
        with health.phase("stepping"):
            health.beat(6)
        health.rolled_back(6, 5, 0.0)
        raise RuntimeError("why")
    (attempt,) = read_attempts(tmp_path)
    assert (attempt.ended, attempt.last_step, attempt.steps_done) == ("failed: why", 5, 2)


# Deadlines


def short(phase: str, seconds: float = 0.4) -> HealthConfig:
    return FAST.model_copy(update={"heartbeat_s": 0.1, module._TIMEOUTS[phase]: seconds})


@pytest.mark.parametrize("phase", list(module._TIMEOUTS))
def test_every_phase_has_a_deadline(tmp_path, capfd, phase):
    codes: list[int] = []
    exited = threading.Event()
    with Health(tmp_path, config=short(phase), exit=lambda code: (codes.append(code), exited.set())) as health:
        with health.phase(phase):
            health.beat(3)
            assert exited.wait(30)
        health._watcher.join()
    assert codes == [76]
    text = capfd.readouterr().err
    assert f"has been {phase} at step 3" in text
    assert f"health.{module._TIMEOUTS[phase]}=0.4 has passed" in text
    assert "test_every_phase_has_a_deadline" in text  # the stack
    assert "test_every_phase_has_a_deadline" in (tmp_path / "process_0.stack.txt").read_text()


def test_a_beat_or_a_new_phase_starts_the_clock_anew(tmp_path):
    exited = threading.Event()
    with Health(tmp_path, config=short("stepping", 1.0), exit=lambda code: exited.set()) as health:
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
    assert "Start the same command again" in err
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
    module.replace_file = module.read_heartbeats = stuck
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
        assert f"pid {killed.pid}) is gone without a word" in err


def test_a_frozen_process_did_not_hang(tmp_path):
    """SIGSTOP for longer than the deadline, then SIGCONT: it goes on. A hang after that is still found."""
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


# Who is to blame


def test_the_silent_before_the_slow():
    beats = [beat(0), beat(1, step=30), beat(2, age=12), beat(3)]
    (text,) = suspects(beats, 4, 1000.0)
    assert text == "process 2 (host h2, pid 102) has been silent for 12 s; it was stepping at step 41"


def test_then_those_furthest_behind():
    texts = suspects([beat(0), beat(1, step=30), beat(2, step=30), beat(3, step=40)], 4, 1000.0)
    assert [text.split(" (")[0] for text in texts] == ["process 1", "process 2"]
    assert "is stepping at step 30" in texts[0]


def test_then_nobody():
    assert "none stands out" in suspects([beat(i) for i in range(4)], 4, 1000.0)[0]
    assert "this process itself" in suspects([beat(0)], 1, 1000.0)[0]


def test_the_missing_the_ended_and_the_unreadable():
    beats = [
        beat(0),
        beat(1, ended="failed: out of memory"),
        beat(2, ended="failed: deadline"),
        beat(3, unreadable="cut"),
    ]
    texts = suspects(beats, 5, 1000.0)
    assert [text.split(":")[0] for text in texts] == [
        "process 4 has no heartbeat",
        "process 1 (host h1, pid 101) has ended (failed",
        "process 3",
    ]


def test_a_failure_of_all_names_the_one_that_is_gone(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        gone = ended.pid
    with Health(tmp_path, 1, 3, FAST) as health:
        others = [
            beat(0, host="h", time=time.time() + 60),
            beat(2, host=socket.gethostname(), pid=gone, time=time.time()),
        ]
        for other in others:
            (tmp_path / f"process_{other.process}.json").write_bytes(module._encode(other))
        health.beat(42)
        text = health.lost_contact(RuntimeError("Gloo: connection reset\nby peer"))
    host = socket.gethostname()
    assert text.splitlines() == [
        f"a computation over all processes failed at step 42 in process 1 (host {host}, pid {os.getpid()}): "
        "Gloo: connection reset",
        f"suspect: process 2 (host {host}, pid {gone}) is gone without a word; it was stepping at step 41",
        "Start the same command again: it goes on from the last checkpoint",
    ]


def test_a_failure_of_all_waits_for_a_silence_to_be_told_and_no_longer(tmp_path):
    with Health(tmp_path, 0, 2, FAST) as health:
        other = beat(1, time=time.time(), every_s=FAST.heartbeat_s)
        (tmp_path / "process_1.json").write_bytes(module._encode(other))
        assert "process 1 (host h1, pid 101) has been silent" in health.lost_contact(RuntimeError("reset"))
        other = beat(1, time=time.time() + 60, ended="failed: a computation over all processes failed at step 3")
        (tmp_path / "process_1.json").write_bytes(module._encode(other))
        assert "suspect: none: all processes are alive" in health.lost_contact(RuntimeError())


# Config


def test_defaults_and_limits():
    assert HealthConfig().timeout_s("compiling") == 1800
    with pytest.raises(ValidationError, match=r"heartbeat_s=5.0 must be at most a quarter .* step_timeout_s=2.0"):
        HealthConfig(step_timeout_s=2.0)
    with pytest.raises(ValidationError):
        HealthConfig(step_timeout_s=0.0)
