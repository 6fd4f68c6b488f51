"""What processes say of themselves: written, read, damaged, and who is to blame."""

import json

import pytest

from tinypod.health.heartbeat import Heartbeat, read_heartbeats, suspects, write_heartbeat


def beat(process: int, step: int = 41, age: float = 0.1, **changes) -> Heartbeat:
    values = {"count": 4, "host": f"h{process}", "pid": 100 + process, "phase": "stepping", "every_s": 1.0}
    return Heartbeat(process=process, **(values | {"step": step, "time": 1000.0 - age} | changes))


def test_it_comes_back_as_written(tmp_path):
    for written in (beat(0), beat(10, ended="done", step_ms={"p50": 1.5}), beat(2)):
        write_heartbeat(tmp_path, written)
    (tmp_path / "process_1.json.tmp").write_text("{")
    (tmp_path / "process_x.json").write_text("{")
    assert read_heartbeats(tmp_path) == [beat(0), beat(2), beat(10, ended="done", step_ms={"p50": 1.5})]
    assert read_heartbeats(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "EOF"),
        ('{"process": 5, "st', "EOF"),
        ("[]", "should be an object"),
        ("\xff", "Invalid JSON"),
        ("{}", "process: Field required"),
        ('{"process": 4}', "it is of process 4"),
        ('{"process": 5, "step": "x"}', "step: Input should be a valid integer"),
        ('{"process": 5, "step": 1.5}', "step: Input should be a valid integer"),
        ('{"process": 5, "step_ms": {"p50": "fast"}}', "step_ms.p50: Input should be a valid number"),
    ],
)
def test_a_damaged_one_says_so(tmp_path, text, why):
    (tmp_path / "process_5.json").write_bytes(text.encode("latin-1"))
    (damaged,) = read_heartbeats(tmp_path)
    assert damaged.process == 5
    assert why in (damaged.unreadable or "")


def test_a_field_of_a_newer_version_is_no_damage(tmp_path):
    (tmp_path / "process_0.json").write_text(json.dumps({"process": 0, "step": 3, "time": 4, "news": 1}))
    assert read_heartbeats(tmp_path) == [Heartbeat(process=0, step=3, time=4.0)]


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
