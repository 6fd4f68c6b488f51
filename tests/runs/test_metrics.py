"""The log of metrics: strict, whole after a kill, rewound when a run goes back."""

import math
from contextlib import closing
from pathlib import Path

import pytest

from tinypod.errors import UserError
from tinypod.experiment import LogConfig
from tinypod.runs.metrics import Metrics, MetricsLog, Stopwatch, make_record, open_metrics


def records_of(run_dir: Path) -> list[tuple[int, dict[str, str]]]:
    """The log as (step, metrics), values as text so that nan equals nan."""
    return [
        (int(record["step"]), {name: repr(record[name]) for name in record.keys() - {"step", "time"}})
        for record in MetricsLog(run_dir).read()
    ]


def test_rows_come_back_as_written_and_the_file_is_strict_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "new" / "run")  # the folder is made
    log.append(make_record(3, {"train/loss": 0.1, "train/grad": math.nan, "a": math.inf, "b": -math.inf}))
    log.append(make_record(3, {"eval/exact_accuracy": 1}))
    first, second = MetricsLog(tmp_path / "new" / "run").read()
    assert (first["step"], first["train/loss"], first["a"], first["b"]) == (3, 0.1, math.inf, -math.inf)
    assert math.isnan(first["train/grad"])
    assert (second["step"], second["eval/exact_accuracy"]) == (3, 1.0)
    assert "train/loss" not in second
    assert "NaN" not in log.path.read_text()  # Python's JSON would write these, and no other reader take them
    assert "Infinity" not in log.path.read_text()


def test_a_missing_log_has_norows_of(tmp_path: Path) -> None:
    MetricsLog(tmp_path).rewind(5)
    assert MetricsLog(tmp_path).read() == []
    assert list(tmp_path.iterdir()) == []


def test_a_line_cut_anywhere_is_no_row_and_the_next_write_replaces_it(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(make_record(1, {"train/loss": 0.5}))
    whole = log.path.read_bytes()
    log.append(make_record(2, {"train/loss": 0.25}))
    last = log.path.read_bytes()[len(whole) :]
    for cut in range(len(last)):
        log.path.write_bytes(whole + last[:cut])
        assert records_of(tmp_path) == [(1, {"train/loss": "0.5"})]
        again = MetricsLog(tmp_path)
        again.append(make_record(7, {"train/loss": 0.125}))
        assert records_of(tmp_path) == [(1, {"train/loss": "0.5"}), (7, {"train/loss": "0.125"})]


@pytest.mark.parametrize(
    "line",
    ["", "{", "[1]", '{"time": 1.0}', '{"step": 1.5, "time": 1.0}', '{"step": 1, "time": 1, "a": "x"}'],
)
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    log = MetricsLog(tmp_path)
    good = '{"step": 1, "time": 1.0}\n'
    text = good + line + "\n" + good
    log.path.write_text(text)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        log.read()
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        log.rewind(0)
    assert log.path.read_text() == text


def test_rewind_drops_later_rows_and_the_cut_tail(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 2, 3, 4):
        log.append(make_record(step, {"train/loss": step}))
    lines = log.path.read_bytes().splitlines(keepends=True)
    with log.path.open("ab") as file:
        file.write(b'{"step": 2, "ti')
    log.rewind(2)
    assert log.path.read_bytes() == b"".join(lines[:3])
    log.append(make_record(3, {"train/loss": 3.5}))  # the log that was open goes on in the new file
    assert [step for step, _ in records_of(tmp_path)] == [1, 2, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_kill_inside_rewind_leaves_the_old_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.append(make_record(step, {"train/loss": step}))
    before = log.path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log.rewind(1)
    assert log.path.read_bytes() == before


def test_a_new_start_keeps_no_row_even_of_step_0(tmp_path: Path) -> None:
    for _ in range(2):
        with closing(open_metrics(tmp_path, LogConfig(tensorboard=False), {}, 0)) as metrics:
            metrics.write(0, {"eval/exact_accuracy": 0.0})
            metrics.write(1, {"train/loss": 1.0})
    assert [step for step, _ in records_of(tmp_path)] == [0, 1]


def test_a_mirror_that_fails_is_reported_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        closed = 0

        def write(self, record: dict[str, float]) -> None:
            if record["step"] == 2:
                raise OSError("disk full")

        def close(self, *, failed: bool = False) -> None:
            self.closed += 1
            raise OSError("still full")

    broken = Broken()
    with closing(Metrics(MetricsLog(tmp_path), {"Broken": broken})) as metrics:  # type: ignore[dict-item]
        for step in range(1, 5):
            metrics.write(step, {"train/loss": 1.0})
    assert [step for step, _ in records_of(tmp_path)] == [1, 2, 3, 4]
    assert broken.closed == 1
    assert [record.getMessage().split(".")[0] for record in caplog.records] == ["Broken stopped: disk full"]


def test_a_stopwatch_leaves_pauses_out() -> None:
    times = iter([0.0, 10.0, 13.0, 20.0, 21.5])
    watch = Stopwatch(clock=lambda: next(times))
    with watch.pause():  # 10 to 13
        pass
    assert watch.lap() == 17.0
    assert watch.lap() == 1.5
