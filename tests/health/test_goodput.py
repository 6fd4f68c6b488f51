"""The ledger: where the time went, over restarts, rollbacks and damage."""

import errno
import json
import logging
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tinypod.health import goodput
from tinypod.health.goodput import read_attempts, summarise
from tinypod.health.ledger import Ledger


class Clock:
    """Wall and monotonic time in one, in place of the module `time`; only the test moves it."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("tinypod.health.ledger.time", clock := Clock())
    return clock


@pytest.fixture
def open_ledger(tmp_path: Path, clock: Clock):
    """Ledgers by that clock, whose listeners are gone after the test, however it ended."""
    opened: list[Ledger] = []

    def make(**options) -> Ledger:
        opened.append(Ledger(tmp_path, **options))
        return opened[-1]

    yield make
    for ledger in opened:
        ledger.end("done", 0)


def spend(ledger: Ledger, clock: Clock, **seconds: float) -> None:
    for kind, value in seconds.items():
        ledger.enter(kind)
        clock.now += value


def attempt(ledger: Ledger, clock: Clock, first: int, last: int, how: str | None, **seconds: float) -> None:
    """A whole attempt; `how` None: killed, after it was written a last time."""
    ledger.begin(first)
    spend(ledger, clock, **seconds)
    ledger.advance(last)
    ledger.write(now=True)
    if how is not None:
        ledger.end(how, last)


def test_time_is_divided_by_phase(open_ledger, clock, tmp_path):
    attempt(open_ledger(), clock, 0, 10, "done", starting=2, compiling=8, stepping=60, evaluating=5, saving=3, data=22)
    result = summarise(tmp_path)
    kinds = {"starting": 2, "compiling": 8, "stepping": 60, "evaluating": 5, "saving": 3, "data": 22}
    assert result.seconds == pytest.approx(kinds)
    assert result.total_s == pytest.approx(100)
    assert result.goodput == pytest.approx(0.6)
    assert sum(map(result.share, result.seconds)) == pytest.approx(1)


def test_what_is_stored_of_an_attempt(open_ledger, clock, tmp_path):
    attempt(open_ledger(processes=4), clock, 3, 10, "failed: x", stepping=7)
    (stored,) = read_attempts(tmp_path)
    assert (stored.first_step, stored.last_step, stored.steps_done) == (3, 10, 7)
    assert (stored.processes, stored.devices, stored.ended) == (4, 8, "failed: x")
    assert stored.device_kind == jax.devices()[0].device_kind
    assert (stored.started, stored.written) == (1000, 1007)


@pytest.mark.parametrize("how", [None, "failed: deadline", "stopped: SIGTERM"])
def test_a_crash_loses_the_steps_after_the_checkpoint_and_the_time_until_the_next_start(
    open_ledger, clock, tmp_path, how
):
    attempt(open_ledger(), clock, 0, 10, how, stepping=100)
    clock.now += 50
    attempt(open_ledger(), clock, 8, 20, "done", restoring=4, stepping=120)
    result = summarise(tmp_path)
    assert result.seconds == pytest.approx({"stepping": 80 + 120, "lost": 20, "restoring": 4, "down": 50})
    assert (result.attempts, result.lost_steps) == (2, 2)
    assert result.goodput == pytest.approx(200 / 274)


@pytest.mark.parametrize("how", ["done", "stopped: SIGINT"])
def test_nobody_waited_after_an_end_that_was_meant(open_ledger, clock, tmp_path, how):
    attempt(open_ledger(), clock, 0, 10, how, stepping=100)
    clock.now += 5000
    attempt(open_ledger(), clock, 10, 20, "done", stepping=100)
    assert summarise(tmp_path).seconds == pytest.approx({"stepping": 200})


def test_a_step_is_lost_once_for_each_time_it_was_done(open_ledger, clock, tmp_path):
    for last in (10, 9, 20):  # two crashes before the first checkpoint
        attempt(open_ledger(), clock, 0, last, None, stepping=10.0 * last)
    result = summarise(tmp_path)
    assert result.seconds == pytest.approx({"stepping": 200, "lost": 190})
    assert result.lost_steps == 19


def test_going_back_further_takes_back_from_every_attempt_on_the_way(open_ledger, clock, tmp_path):
    attempt(open_ledger(), clock, 0, 10, "done", stepping=100)
    attempt(open_ledger(), clock, 10, 20, "done", stepping=50)
    attempt(open_ledger(), clock, 6, 20, "done", stepping=140)
    result = summarise(tmp_path)
    assert result.seconds == pytest.approx({"stepping": 60 + 140, "lost": 40 + 50})
    assert result.lost_steps == 14


def test_a_start_that_did_not_get_to_its_checkpoint_is_time_without_a_process(open_ledger, clock, tmp_path):
    attempt(open_ledger(), clock, 0, 10, None, stepping=100)
    before = (tmp_path / goodput.FILE).read_bytes()
    ledger = open_ledger()
    spend(ledger, clock, starting=5)
    ledger.write(now=True)
    ledger.end("failed: no such host", 0)
    assert (tmp_path / goodput.FILE).read_bytes() == before  # no entry
    attempt(open_ledger(), clock, 10, 11, "done", stepping=10)
    assert summarise(tmp_path).seconds == pytest.approx({"stepping": 110, "down": 5})


def test_a_rollback_takes_its_stepping_with_it(open_ledger, clock, tmp_path):
    ledger = open_ledger()
    ledger.begin(0)
    spend(ledger, clock, stepping=100)
    ledger.advance(10)
    ledger.rolled_back(12, 5, 60.0)
    spend(ledger, clock, restoring=3, stepping=50)
    ledger.end("done", 10)
    result = summarise(tmp_path)
    assert result.seconds == pytest.approx({"stepping": 90, "lost": 60, "restoring": 3})
    assert (result.lost_steps, result.rollbacks) == (7, 1)
    assert read_attempts(tmp_path)[0].steps_done == 17


def test_a_clock_that_was_set_back_makes_no_negative_time(open_ledger, clock, tmp_path):
    attempt(open_ledger(), clock, 0, 10, None, stepping=100)
    clock.now = 10.0
    attempt(open_ledger(), clock, 10, 20, None, stepping=100)
    clock.now += 50
    attempt(open_ledger(), clock, 20, 30, "done", stepping=100)
    assert summarise(tmp_path).seconds == pytest.approx({"stepping": 300, "down": 50})


def test_compiling_is_taken_out_of_the_phase_it_happens_in(tmp_path):
    began = time.monotonic()
    ledger = Ledger(tmp_path)
    try:
        ledger.begin(0)
        ledger.enter("evaluating")
        slow = jax.jit(lambda x: sum((x + i).sum() for i in map(np.float32, range(40))))
        slow(jax.device_put(np.ones(3, np.float32)))
        spent = time.monotonic() - began
    finally:
        ledger.end("done", 1)
    (stored,) = read_attempts(tmp_path)
    assert 0 < stored.compile_s <= stored.seconds["compiling"]
    assert stored.seconds["compiling"] > 0.5 * spent  # nearly all of it was compiling
    assert stored.seconds["evaluating"] >= 0
    assert sum(stored.seconds.values()) <= time.monotonic() - began  # moved, not added
    assert stored.compiles >= 1


def test_the_last_step_that_was_measured_is_reported(open_ledger, clock, tmp_path):
    for size in (3 * 2**20, None):
        ledger = open_ledger()
        ledger.compiled(size)
        attempt(ledger, clock, 0, 10, "done", stepping=1)
    assert [stored.step_bytes for stored in read_attempts(tmp_path)] == [3 * 2**20, None]
    assert summarise(tmp_path).step_bytes == 3 * 2**20


def test_other_threads_compile_beside_the_loop(tmp_path):
    ledger = Ledger(tmp_path)
    try:
        ledger.begin(0)
        ledger.enter("stepping")
        x = jax.device_put(np.ones(3, np.float32))
        compile_it = jax.jit(lambda x: x * x + x)
        thread = threading.Thread(target=compile_it, args=(x,))
        thread.start()
        thread.join()
    finally:
        ledger.end("done", 1)
    (stored,) = read_attempts(tmp_path)
    assert stored.compiles >= 1
    assert "compiling" not in stored.seconds


def test_hits_of_the_persistent_cache_are_counted(open_ledger, tmp_path):
    ledger = open_ledger()
    ledger.begin(0)
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    jax.monitoring.record_event("/jax/compilation_cache/other")
    ledger.end("done", 0)
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")  # after the end: not ours
    assert summarise(tmp_path).cache_hits == 1


def test_the_listeners_go_with_the_end(tmp_path):
    from jax._src import monitoring

    before = list(monitoring.get_event_duration_listeners()), list(monitoring.get_event_listeners())
    ledger = Ledger(tmp_path)
    ledger.begin(0)
    ledger.end("done", 0)
    ledger.end("failed: later", 0)
    Ledger(tmp_path).end("failed before it began", 0)
    assert before == (list(monitoring.get_event_duration_listeners()), list(monitoring.get_event_listeners()))
    assert read_attempts(tmp_path)[0].ended == "done"


def test_the_fullest_device_is_reported_where_devices_say(open_ledger, tmp_path, monkeypatch):
    class Device:
        def __init__(self, stats: dict[str, int] | None) -> None:
            self.memory_stats = lambda: stats

    ledger = open_ledger()
    ledger.begin(0)
    ledger.write(now=True)
    assert summarise(tmp_path).peak_bytes is None  # a CPU does not
    devices = [Device({"peak_bytes_in_use": 3 * 2**30}), Device({"peak_bytes_in_use": 5 * 2**30}), Device(None)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    ledger.end("done", 0)
    assert summarise(tmp_path).peak_bytes == 5 * 2**30


def test_writes_are_throttled_but_for_the_last(open_ledger, clock, tmp_path):
    ledger = open_ledger()
    ledger.begin(0)
    clock.now += 1
    ledger.advance(1)
    ledger.write()
    assert read_attempts(tmp_path)[0].last_step == 0
    clock.now += 10
    ledger.write()
    assert read_attempts(tmp_path)[0].last_step == 1
    ledger.end("done", 2)
    assert read_attempts(tmp_path)[0].last_step == 2


@pytest.mark.parametrize(
    "content", [b"", b'{"version": 1, "att', b"[1, 2]", b'{"version": 9, "attempts": []}', b"\xff\xfe"]
)
def test_a_damaged_or_foreign_file_is_set_aside(open_ledger, clock, tmp_path, caplog, content):
    for number in range(2):
        (tmp_path / goodput.FILE).write_bytes(content)
        assert "goodput.json" in (summarise(tmp_path).unreadable or "")
        with caplog.at_level(logging.WARNING):
            ledger = open_ledger()
            assert (tmp_path / goodput.FILE).read_bytes() == content
            ledger.begin(0)
            ledger.end("done", 0)
        assert "set aside" in caplog.text
        aside = "goodput.json.damaged" + (f".{number}" if number else "")
        assert (tmp_path / aside).read_bytes() == content
        assert summarise(tmp_path).attempts == 1


def test_a_full_disk_is_reported_once_and_ends_nothing(open_ledger, clock, tmp_path, caplog, monkeypatch):
    ledger = open_ledger()
    ledger.begin(0)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("tinypod.health.ledger.replace_file", full)
        for _ in range(3):
            ledger.write(now=True)
    assert caplog.text.count("No space left") == 1
    ledger.end("done", 1)
    assert read_attempts(tmp_path)[0].ended == "done"


def test_no_ledger_is_no_attempt(tmp_path):
    result = summarise(tmp_path)
    assert (result.attempts, result.total_s, result.goodput) == (0, 0, 0)


def test_a_kind_of_a_newer_version_is_counted(tmp_path):
    stored = {"started": 0, "written": 9, "seconds": {"dreaming": 9.0}, "news": 1}
    (tmp_path / goodput.FILE).write_text(json.dumps({"version": 1, "attempts": [stored]}))
    assert summarise(tmp_path).seconds == {"dreaming": 9.0}
