"""The metrics of a run that trains, for all its processes: process 0 writes them, the others only know the scores.

Scores are the values of the metric that decides which checkpoint is the best, by step. They come from `metrics.jsonl`,
so that an evaluation counts for its checkpoint whether it was made before or after the checkpoint was saved.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tinypod.experiment import Experiment
from tinypod.runs.folder import Run
from tinypod.runs.metrics import Metrics, MetricsLog, open_metrics


def read_scores(folder: Path, metric: str | None) -> dict[int, float]:
    """By step, the last one counts."""
    rows = MetricsLog(folder).read() if metric is not None else []
    return {int(row["step"]): row[metric] for row in rows if metric in row}


class RunLog:
    """`metrics.jsonl` and its mirrors, from the step that the run resumes at."""

    def __init__(self, run: Run, experiment: Experiment, scores: dict[int, float], *, primary: bool) -> None:
        self.run, self.scores, self._primary = run, scores, primary
        self._experiment, self._metric = experiment, experiment.best and experiment.best.name
        self._metrics: Metrics | None = None

    def open(self, step: int) -> None:
        """Drop what was logged after a step, which will be written again."""
        self.close()
        for later in [known for known in self.scores if known > step]:
            del self.scores[later]
        if self._primary:
            log = self._experiment.config.log
            config: dict[str, Any] = self._experiment.config.model_dump(mode="json")
            self._metrics = open_metrics(
                self.run.folder, tensorboard=log.tensorboard, wandb=log.wandb, config=config, resume_step=step
            )

    def write(self, step: int, row: Mapping[str, float]) -> None:
        if self._metric in row:
            self.scores[step] = row[self._metric]  # type: ignore[index]
        if self._metrics is not None:
            self._metrics.write(step, row)

    def flush(self) -> None:
        """What a checkpoint holds must be in the log before it, and in the store: a full disk may have refused rows."""
        if self._metrics is not None:
            self._metrics.flush()
            self.run.push()

    def close(self, *, failed: bool = False) -> None:
        if self._metrics is not None:
            self._metrics.close(failed=failed)
        self._metrics = None


def encode_scores(scores: Mapping[int, float]) -> str:
    return json.dumps(list(scores.items()))


def decode_scores(text: str) -> dict[int, float]:
    pairs: Iterable[tuple[int, float]] = json.loads(text)
    return {int(step): float(score) for step, score in pairs}
