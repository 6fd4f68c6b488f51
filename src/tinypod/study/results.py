"""What the runs of a study have reached, read from its folder.

`study.json` names the runs, `runs/NAME/metrics.jsonl` has what they logged and `runs/NAME/outcome.json` how they ended.
A run without an outcome is waiting. A run counts in means if it ended by itself ("done") or by a rule
("stopped_early") and its last evaluation is finite: the rule that stopped it belongs to the study, and leaving such
runs out would leave out the bad ones. One that diverged or failed has no result that a mean could use, so it is left
out and counted; one that is running or waiting has none yet.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from tinypod.errors import UserError
from tinypod.runs.metrics import MetricsLog
from tinypod.runs.mirrors import Record
from tinypod.runs.storage import inside

STUDY_FILE, OUTCOME_FILE, RUNS = "study.json", "outcome.json", "runs"
State = Literal["done", "stopped_early", "diverged", "failed", "running", "waiting"]
Direction = Literal["max", "min"]
_LAST_PART = 0.1  # of a run: what "at the end" means for noisy training metrics


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RunEntry(_Read):
    name: str
    variant: str
    levels: dict[str, Any] = {}
    seed: int
    num_weights: int | None = None
    flops_per_step: float | None = None


class StudyFile(_Read):
    name: str
    base: str
    metric: str
    direction: Direction
    metric_label: str
    metric_format: str
    target: float | None = None
    factors: dict[str, list[Any]] = {}
    runs: list[RunEntry]


class Outcome(_Read):
    state: State = "waiting"
    reason: str | None = None
    step: int = 0
    seconds: float = 0.0
    packed: int = 1


@dataclass(frozen=True)
class Curve:
    """Values over steps, finite ones only, steps rising."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class RunResult:
    entry: RunEntry
    outcome: Outcome
    metric: Curve  # the study's metric, held out
    train_metric: Curve  # the same in training; empty if the task does not log it
    loss: Curve  # in training
    clock: Curve  # seconds of device time up to a step
    last_is_finite: bool  # the last evaluation
    direction: Direction

    @property
    def ended(self) -> bool:
        return self.outcome.state not in ("running", "waiting")

    @property
    def counts(self) -> bool:
        return self.outcome.state in ("done", "stopped_early") and len(self.metric) > 0 and self.last_is_finite

    @property
    def final(self) -> float:
        return float(self.metric.values[-1])

    @property
    def best(self) -> float:
        return float(self.metric.values.max() if self.direction == "max" else self.metric.values.min())

    @cached_property
    def gap(self) -> tuple[float, float] | None:
        """The metric in training over the last tenth of the run, and held out at its end."""
        if not len(self.train_metric) or not len(self.metric):
            return None
        steps, values = self.train_metric.steps, self.train_metric.values
        return float(values[steps >= (1 - _LAST_PART) * steps[-1]].mean()), self.final

    @property
    def seconds(self) -> float | None:
        return float(self.clock.values[-1]) if len(self.clock) else None

    @property
    def flops(self) -> float | None:
        per_step = self.entry.flops_per_step
        return per_step * float(self.metric.steps[-1]) if per_step is not None and len(self.metric) else None

    def step_reaching(self, target: float) -> float | None:
        """The step at which the metric first reached the target, linear between two evaluations. None: never."""
        steps, values = self.metric.steps, self.metric.values
        reached = np.flatnonzero(values >= target if self.direction == "max" else values <= target)
        if not len(reached):
            return None
        at = int(reached[0])
        if at == 0:
            return float(steps[0])
        share = (target - values[at - 1]) / (values[at] - values[at - 1])
        return float(steps[at - 1] + share * (steps[at] - steps[at - 1]))

    def seconds_at(self, step: float) -> float | None:
        if not len(self.clock):
            return None
        return float(np.interp(step, [0.0, *self.clock.steps], [0.0, *self.clock.values]))


@dataclass(frozen=True)
class Study:
    file: StudyFile
    runs: list[RunResult]


def read_study(folder: Path) -> Study:
    path = folder / STUDY_FILE
    if not path.exists():
        raise UserError(
            f"{folder} is not the folder of a study: it has no {STUDY_FILE}. Give the folder that `tinypod study run` "
            "wrote to"
        )
    file = _read_json(path, StudyFile)
    if not file.runs:
        raise UserError(f"{path}: runs is empty: a study without runs has nothing to report")
    return Study(file, [_read_run(folder / RUNS, entry, file) for entry in file.runs])


def _read_run(runs: Path, entry: RunEntry, file: StudyFile) -> RunResult:
    run_dir = inside(runs, entry.name)
    path = run_dir / OUTCOME_FILE
    outcome = _read_json(path, Outcome) if path.exists() else Outcome()
    records = MetricsLog(run_dir).read()
    evaluations = [record[file.metric] for record in records if file.metric in record]
    return RunResult(
        entry,
        outcome,
        metric=_curve(records, file.metric),
        train_metric=_curve(records, "train/" + file.metric.partition("/")[2]),
        loss=_curve(records, "train/loss"),
        clock=_clock(records, outcome),
        last_is_finite=bool(evaluations) and math.isfinite(evaluations[-1]),
        direction=file.direction,
    )


def _curve(records: Iterable[Record], name: str) -> Curve:
    """One value a step: a later record of the same step replaces the earlier."""
    found = {record["step"]: record[name] for record in records if math.isfinite(record.get(name, math.nan))}
    steps = sorted(found)
    return Curve(np.array(steps, dtype=np.float64), np.array([found[step] for step in steps], dtype=np.float64))


def _clock(records: Iterable[Record], outcome: Outcome) -> Curve:
    """Time of training steps alone: `perf/step_ms` of each record times the steps since the record before it.

    Runs of a pack share their devices, and each has the step time of all: its part is one of `packed`.
    """
    times = _curve(records, "perf/step_ms")
    if len(times):
        seconds = np.cumsum(np.diff(times.steps, prepend=0.0) * times.values) / 1000
        return Curve(times.steps, seconds / max(1, outcome.packed))
    if outcome.step and outcome.seconds:
        return Curve(np.array([float(outcome.step)]), np.array([outcome.seconds / max(1, outcome.packed)]))
    return Curve(np.array([]), np.array([]))


_Model = TypeVar("_Model", bound=BaseModel)


def _read_json(path: Path, model: type[_Model]) -> _Model:
    try:
        return model.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {key or 'the file'}: {first['msg']}. Correct it, or run the study again") from error
    except ValueError as error:  # JSON and UTF-8 errors are ValueErrors too
        raise UserError(f"{path}: not JSON ({error}). Correct it, or run the study again") from error
