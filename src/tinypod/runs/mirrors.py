"""Copies of `metrics.jsonl` in TensorBoard and W&B. Each begins by making itself equal to the log's records.

TensorBoard and offline W&B are written anew. Online W&B continues after the records that the server has or, where a
rewind has taken back records that it may have, is overwritten from record 0. W&B's own `_step` is the record's number
in the log (W&B merges records of one step and drops a step lower than its last); charts use our `step`. The server
overwrites record by record: it shows old records until the run is past them again.
"""

import json
import shutil
import socket
import struct
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinypod.errors import UserError
from tinypod.runs.storage import replace_file

if TYPE_CHECKING:
    from tinypod.experiment import WandbConfig

Record = dict[str, float]  # "step" is an int, "time" and every metric a float

_EVENT_FILE_SUFFIX = ".tinypod"  # tells our event files from others, such as the profiler's
_WANDB_FINISH_TIMEOUT_S = 300.0  # W&B's default waits for ever; what is not uploaded then goes up on resume


class TensorBoardMirror:
    """`run_dir/tensorboard/`: one event file, written anew from the log on opening."""

    def __init__(self, run_dir: Path, records: list[Record]) -> None:
        # Not SummaryWriter: once the disk is full its queue blocks the caller for ever, and its flush() does
        # not wait for the queue. Nor EventsWriter, whose flush() waits for the disk: milliseconds for each row, of what
        # is written anew at the next start anyway.
        from tensorboardX.proto.event_pb2 import Event

        folder = run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"events.out.tfevents.*{_EVENT_FILE_SUFFIX}"):
            old.unlink()
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}{_EVENT_FILE_SUFFIX}"
        self._file = open(folder / name, "wb")  # noqa: SIM115 (closed in `close`)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.write(*records)

    def write(self, *records: Record) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        for record in records:
            values = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in _metrics(record).items()])
            self._append(Event(wall_time=record["time"], step=record["step"], summary=values))
        self._file.flush()

    def _append(self, event: Any) -> None:
        """As a TFRecord: length and data, each with its checksum."""
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()
        for part in (struct.pack("<Q", len(data)), data):
            self._file.write(part + struct.pack("<I", masked_crc32c(part)))

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


class WandbMirror:
    """One W&B run through every resume. `wandb.json` has its id and which records of the log W&B may have."""

    def __init__(self, run_dir: Path, settings: "WandbConfig", config: dict[str, Any], records: list[Record]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("W&B is missing: pip install 'tinypod[wandb]', or turn it off.") from error
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path, self._online = run_dir / "wandb.json", settings.mode == "online"
        # records: how many records of the log W&B may have; time: the last of these, by its time; stale: up to
        # which record W&B may have others, from before a rewind, and 0 only when it surely has none.
        self._state: dict[str, Any] = {"id": uuid.uuid4().hex[:8], "records": 0, "time": 0.0, "stale": 0}
        if self._path.exists():
            self._state = json.loads(self._path.read_text())
        given = self._state["records"]
        same = given == 0 or (given <= len(records) and self._state["time"] == records[given - 1]["time"])
        resume = self._online and same and self._state["stale"] == 0
        # Saved before W&B gets a record: after a kill the record may name a record too many, never one too few.
        stale = 0 if resume else max(self._state["stale"], given)
        self._save(records=len(records), time=records[-1]["time"] if records else 0.0, stale=stale)
        # Of two offline folders of one run `wandb sync` lets the later replace the earlier: one has it all.
        for old in (run_dir / "wandb").glob(f"offline-run-*-{self._state['id']}*"):
            shutil.rmtree(old, ignore_errors=True)
        options: dict[str, Any] = {"console": "off"}  # only the log feeds a mirror
        if "finish_timeout" in wandb.Settings.model_fields:  # newer than the oldest wandb that will do
            options |= {"finish_timeout": _WANDB_FINISH_TIMEOUT_S, "finish_timeout_raises": True}
        more: dict[str, Any] = {"id": self._state["id"], "resume": "allow" if resume else None}
        more |= {"dir": str(run_dir), "reinit": "create_new", "settings": wandb.Settings(**options)}
        try:
            self._run = wandb.init(**settings.model_dump(), **more, config=config)
        except Exception as error:
            hint = "Run `wandb login`, set the mode to offline, or turn W&B off."
            raise UserError(f"W&B did not start: {error}. {hint}") from error
        self._run.define_metric("*", step_metric="step")
        self._next = self._run.starting_step if resume else 0  # the server's own count of the records it has
        for record in records[self._next :]:
            self._log(record)

    def write(self, record: Record) -> None:
        self._save(records=self._next + 1, time=record["time"])
        self._log(record)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))  # online: returns when the server has every record, or raises
        if self._online and self._next >= self._state["stale"]:
            self._save(stale=0)

    def _log(self, record: Record) -> None:
        data = {"step": record["step"], "_timestamp": record["time"], **_metrics(record)}
        self._run.log(data, step=self._next, commit=True)
        self._next += 1

    def _save(self, **changes: Any) -> None:
        self._state |= changes
        replace_file(self._path, json.dumps(self._state).encode(), durable=True)


Mirror = TensorBoardMirror | WandbMirror


def _metrics(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in ("step", "time")}
