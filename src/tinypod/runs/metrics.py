"""A run's metrics: `metrics.jsonl`, which is the truth, and TensorBoard and W&B, which copy it.

One line a record: `{"step": 40, "time": 1767225600.0, "train/loss": 0.31, ...}`; `time` is Unix seconds. The
lines are strict JSON, so a value that is not finite is the string "nan", "inf" or "-inf", and reads back as
that float. Rows of one step (training and evaluation) stay apart. A line counts once its newline is on disk:
what a kill leaves after the last newline was never written, and the next writer removes it.

A run that resumes at step S first drops the records after S, which it will write again. Then the mirrors
(`mirrors.py`) make themselves equal to the log.
"""

import contextlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinypod.errors import StorageError, UserError
from tinypod.runs.mirrors import Mirror, Record, TensorBoardMirror, WandbMirror
from tinypod.runs.storage import replace_file

if TYPE_CHECKING:
    from tinypod.experiment import LogConfig

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
_MIRROR_FAILED = "%s %s: %s. Training continues, and metrics.jsonl has every record."


def make_record(step: int, values: Mapping[str, float]) -> Record:
    assert not {"step", "time"} & values.keys(), "step and time are the record's own columns"
    return {"step": int(step), "time": time.time()} | {name: float(value) for name, value in values.items()}


class MetricsLog:
    """Owns `run_dir/metrics.jsonl`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE

    def append(self, record: Record) -> None:
        """One system call: a kill leaves at most one cut last line."""
        strict = {name: value if math.isfinite(value) else str(value) for name, value in record.items()}
        data = json.dumps(strict, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with io.FileIO(self.path, "a+") as file:
            size = file.seek(0, io.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":  # a cut last line goes
                file.truncate(sum(len(line) + 1 for line in self._lines()))
            if file.write(data) != len(data):
                raise OSError(f"{self.path}: no space left for a record of metrics")

    def read(self) -> list[Record]:
        """Every record in the order written, without a cut last line; no file reads as no records."""
        return [self._parse(line, number) for number, line in enumerate(self._lines(), start=1)]

    def rewind(self, step: int) -> None:
        """Drops the records after `step` and a cut last line, in one atomic replacement of the file."""
        if not self.path.exists():
            return
        kept = [line for line, record in zip(self._lines(), self.read(), strict=True) if record["step"] <= step]
        data = b"".join(line + b"\n" for line in kept)
        if len(data) != self.path.stat().st_size:
            replace_file(self.path, data, durable=True)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []

    def _parse(self, line: bytes, number: int) -> Record:
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or type(record.get("step")) is not int or "time" not in record:
                raise ValueError("no integer step, or no time")
            return {name: _from_json(name, value) for name, value in record.items()}
        except ValueError as error:  # JSON and UTF-8 errors are ValueErrors too
            raise UserError(
                f"{self.path}:{number}: not a record of metrics ({error}): {line[:80]!r}. Expected a JSON "
                "object with an integer step, a time and numbers; correct the line or remove it."
            ) from error


class Metrics:
    """The log and its mirrors, by name. A mirror that fails is reported and dropped; the log continues.

    Rows that a full disk refuses are kept in memory and written when there is room again.
    """

    def __init__(self, log: MetricsLog, mirrors: dict[str, Mirror]) -> None:
        self.log, self.mirrors = log, mirrors
        self._waiting: list[Record] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        full = bool(self._waiting)
        self._waiting.append(make_record(step, values))
        try:
            self.flush()
        except StorageError as error:
            if not full:
                logger.warning("%s. Training continues, and the records are kept until there is room.", error)

    def flush(self) -> None:
        """Write what waits, or say why not."""
        while self._waiting:
            record = self._waiting[0]
            try:
                self.log.append(record)
            except OSError as error:
                raise StorageError(f"{self.log.path}: {error.strerror or error}") from error
            self._waiting.pop(0)
            self._copy(record)

    def _copy(self, record: Record) -> None:
        for name, mirror in list(self.mirrors.items()):
            try:
                mirror.write(record)
            except Exception as error:
                logger.warning(_MIRROR_FAILED, name, "stopped", error)
                del self.mirrors[name]
                with contextlib.suppress(Exception):
                    mirror.close(failed=True)

    def close(self, *, failed: bool = False) -> None:
        try:
            self.flush()
        except StorageError as error:
            lost = len(self._waiting)
            logger.warning("%s. %d records of metrics are lost; the next start writes them again", error, lost)
        while self.mirrors:
            name, mirror = self.mirrors.popitem()
            try:
                mirror.close(failed=failed)
            except Exception as error:
                logger.warning(_MIRROR_FAILED, name, "did not close", error)


def open_metrics(run_dir: Path, settings: "LogConfig", config: dict[str, Any], resume_step: int) -> Metrics:
    """Rewinds the log to the step restored (0: the run starts over and no record stays) and opens the mirrors.

    A mirror that cannot start stops a new run with an error; a run that resumes does without it.
    """
    log, wandb = MetricsLog(run_dir), settings.wandb
    log.rewind(resume_step if resume_step > 0 else -1)
    records = log.read()
    openers: dict[str, Callable[[], Mirror]] = {}
    if settings.tensorboard:
        openers["TensorBoard"] = lambda: TensorBoardMirror(run_dir, records)
    if wandb is not None and wandb.mode != "disabled":
        openers["W&B"] = lambda: WandbMirror(run_dir, wandb, config, records)
    metrics = Metrics(log, {})
    for name, opener in openers.items():
        try:
            metrics.mirrors[name] = opener()
        except Exception as error:
            if resume_step == 0:
                metrics.close(failed=True)
                raise
            logger.warning(_MIRROR_FAILED, name, "did not start", error)
    return metrics


class Stopwatch:
    """Seconds of training between logging points; evaluation and saving stand in `pause()`, not counted."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._start = clock, clock()

    def lap(self) -> float:
        """The seconds since the last lap, less the pauses; the next lap begins."""
        now = self._clock()
        seconds, self._start = now - self._start, now
        return seconds

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        began = self._clock()
        yield
        self._start += self._clock() - began


def _from_json(name: str, value: object) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}")
    return value if name == "step" else float(value)
