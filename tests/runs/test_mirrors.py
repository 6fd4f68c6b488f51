"""Mirrors are compared with metrics.jsonl after real kills; W&B's files are read from their records."""

import json
import os
import signal
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from test_metrics import records_of

from tinypod.errors import UserError
from tinypod.experiment import LogConfig, WandbConfig
from tinypod.runs.metrics import MetricsLog, open_metrics
from tinypod.runs.mirrors import WandbMirror

# Writes records for steps (resume, last], two for an even step; may then kill itself (1), or itself and its W&B
# service (2), with a record in the log that no mirror was given and a last line cut short.
_WRITER = """
import os, signal, sys
from pathlib import Path
from tinypod.experiment import LogConfig, WandbConfig
from tinypod.runs.metrics import make_record, open_metrics
run_dir, mirror, resume, last, kill = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
wandb = WandbConfig(project="tests", mode="offline") if mirror == "wandb" else None
metrics = open_metrics(run_dir, LogConfig(tensorboard=mirror == "tensorboard", wandb=wandb), {"lr": 0.1}, resume)
for step in range(resume + 1, last + 1):
    metrics.write(step, {"train/loss": 1 / step, "train/odd": float("nan") if step % 2 else float("inf")})
    if step % 2 == 0:
        metrics.write(step, {"eval/exact_accuracy": step / 100})
if kill:
    metrics.log.append(make_record(last + 1, {"train/loss": 99.0}))
    with open(run_dir / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 1')
    os.kill(os.getpid(), signal.SIGKILL) if kill == 1 else os.killpg(0, signal.SIGKILL)
metrics.close()
"""


def _write_in_process(run_dir: Path, mirror: str, resume: int, last: int, *, kill: int) -> None:
    wandb = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_MODE": "offline"}
    wandb |= {"WANDB_X_DISABLE_STATS": "true", "WANDB_X_DISABLE_META": "true", "WANDB_DISABLE_GIT": "true"}
    arguments = [str(run_dir), mirror, str(resume), str(last), str(kill)]
    done = subprocess.run(
        [sys.executable, "-c", _WRITER, *arguments],
        env=os.environ | wandb,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr


def test_tensorboard_equals_the_log_after_a_kill_and_a_rewind(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def events() -> list[tuple[str, int, str]]:
        accumulator = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
        accumulator.Reload()
        return sorted(
            (tag, event.step, f"{event.value:.6g}")
            for tag in accumulator.Tags()["scalars"]
            for event in accumulator.Scalars(tag)
        )

    def expected() -> list[tuple[str, int, str]]:
        records = records_of(tmp_path)
        return sorted((tag, step, f"{float(value):.6g}") for step, record in records for tag, value in record.items())

    foreign = tmp_path / "tensorboard" / "events.out.tfevents.1.profile"
    foreign.parent.mkdir()
    foreign.touch()
    _write_in_process(tmp_path, "tensorboard", 0, 6, kill=1)
    assert len(events()) == len(expected()) - 1  # up to the kill, which came before the last record was mirrored
    _write_in_process(tmp_path, "tensorboard", 4, 9, kill=0)
    assert [step for step, _ in records_of(tmp_path)] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9]
    assert events() == expected()
    assert foreign.exists()


def _wandb_records(path: Path) -> list[object]:
    """W&B's transaction log: a 7-byte header, then LevelDB log records in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:
            break
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def test_offline_wandb_equals_the_log_after_a_kill_and_a_rewind(tmp_path: Path) -> None:
    def history() -> tuple[set[str], list[tuple[int, dict[str, str]]], list[int], list[float]]:
        ids, records, numbers, times = set(), [], [], []
        for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
            for record in _wandb_records(path):
                if record.WhichOneof("record_type") == "run":
                    ids.add(record.run.run_id)
                if record.WhichOneof("record_type") == "history":
                    items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                    values = {name: repr(float(json.loads(value))) for name, value in items.items() if name[0] != "_"}
                    records.append((int(float(values.pop("step"))), values))
                    numbers.append(record.history.step.num)
                    times.append(json.loads(items["_timestamp"]))
        return ids, records, numbers, times

    _write_in_process(tmp_path, "wandb", 0, 3, kill=0)
    run_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
    _write_in_process(tmp_path, "wandb", 2, 6, kill=1)
    _write_in_process(tmp_path, "wandb", 4, 9, kill=2)
    _write_in_process(tmp_path, "wandb", 10, 11, kill=0)  # step 10: in the log, but no mirror was given it
    ids, records, numbers, times = history()
    assert [step for step, _ in records] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 10, 11]
    assert records == records_of(tmp_path)
    assert ids == {run_id}
    assert numbers == list(range(len(records)))
    assert times == [record["time"] for record in MetricsLog(tmp_path).read()]


class _Settings:
    model_fields = ("finish_timeout",)

    def __init__(self, **options: object) -> None:
        assert options["finish_timeout"]


class _Server:
    """Stands in for the `wandb` module and its server, after wandb-core's source: records are kept by number,
    and written over when a run starts without resuming; `starting_step` counts them; no step may be low."""

    Settings = _Settings

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.ids: list[str] = []

    def init(self, *, id: str, resume: str | None, mode: str, **_: object) -> "_Server":
        assert mode == "online"
        self.ids.append(id)
        self.sent: list[dict[str, float]] = []
        self.starting_step = len(self.records) if resume == "allow" else 0
        self.next = self.starting_step
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, data: dict[str, float], *, step: int, commit: bool) -> None:
        assert commit
        assert step >= self.next, "W&B would drop this record"
        self.sent.append(data)
        self.next = step + 1

    def finish(self, exit_code: int) -> None:
        self.upload(len(self.sent))

    def upload(self, count: int) -> None:
        """The first `count` records sent by this process arrive."""
        for number, record in enumerate(self.sent[:count], start=self.starting_step):
            self.records[number : number + 1] = [record]


def _train(run_dir: Path, resume: int, last: int, *, kill: bool = False, scale: float = 1.0) -> None:
    settings = WandbConfig(project="tests", mode="online")
    metrics = open_metrics(run_dir, LogConfig(tensorboard=False, wandb=settings), {}, resume)
    for step in range(resume + 1, last + 1):
        metrics.write(step, {"train/loss": scale / step})
        if step % 2 == 0:
            metrics.write(step, {"eval/exact_accuracy": scale * step})
    if not kill:
        metrics.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> _Server:
    server = _Server()
    monkeypatch.setitem(sys.modules, "wandb", server)  # type: ignore[arg-type]
    return server


def _assert_same(server: _Server, run_dir: Path) -> None:
    expected = [
        {"step": record["step"], "_timestamp": record["time"]} | {k: v for k, v in record.items() if "/" in k}
        for record in MetricsLog(run_dir).read()
    ]
    assert server.records == expected
    assert len(set(server.ids)) == 1


@pytest.mark.parametrize("arrived", [0, 1, 4, 9])
def test_online_wandb_gets_the_rows_it_lacks(tmp_path: Path, server: _Server, arrived: int) -> None:
    _train(tmp_path, 0, 6, kill=True)
    server.upload(arrived)
    _train(tmp_path, 6, 9)
    _assert_same(server, tmp_path)
    assert server.starting_step == arrived  # W&B's run went on, nothing was sent twice


@pytest.mark.parametrize("arrived", [0, 3, 9])
@pytest.mark.parametrize("arrived_again", [0, 2, 7, 13])
def test_online_wandb_is_overwritten_after_a_rewind(
    tmp_path: Path, server: _Server, arrived: int, arrived_again: int
) -> None:
    _train(tmp_path, 0, 6, kill=True)
    server.upload(arrived)
    _train(tmp_path, 3, 9, kill=True, scale=2.0)  # other values: the old ones must go
    server.upload(arrived_again)  # old records may still be there
    _train(tmp_path, 9, 10)
    _assert_same(server, tmp_path)
    _train(tmp_path, 10, 11)
    _assert_same(server, tmp_path)
    assert server.starting_step > 0  # clean again: goes on


def test_rows_rewritten_while_wandb_was_off_replace_the_old(tmp_path: Path, server: _Server) -> None:
    _train(tmp_path, 0, 6)
    with closing(open_metrics(tmp_path, LogConfig(tensorboard=False), {}, 2)) as metrics:
        for step in range(3, 12):
            metrics.write(step, {"train/loss": 7.0})
    _train(tmp_path, 11, 12)
    _assert_same(server, tmp_path)


def test_a_shorter_run_after_a_rewind_is_put_right_by_the_next(tmp_path: Path, server: _Server) -> None:
    _train(tmp_path, 0, 8)
    _train(tmp_path, 2, 3)  # the server still shows the old records after step 3
    _train(tmp_path, 3, 12)
    _assert_same(server, tmp_path)


def test_wandb_missing_stops_a_new_run_but_not_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'tinypod\[wandb\]'"):
        _train(tmp_path, 0, 1)
    _train(tmp_path, 2, 4)
    assert [step for step, _ in records_of(tmp_path)] == [3, 4, 4]
    assert "W&B did not start" in caplog.text


def test_disabled_wandb_needs_no_package_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = WandbConfig(project="tests", mode="disabled")
    with closing(open_metrics(tmp_path, LogConfig(tensorboard=False, wandb=settings), {}, 0)) as metrics:
        metrics.write(1, {"train/loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_wandb_that_cannot_start_is_a_user_error(
    tmp_path: Path, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_key(**_: object) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(server, "init", no_key)
    with pytest.raises(UserError, match=r"api_key not configured.*wandb login"):
        WandbMirror(tmp_path, WandbConfig(project="tests"), {}, [])
