"""The metrics of a run that trains: process 0 writes them.

Scores are the values of the metric that decides which checkpoint is the best, by step. They come from `metrics.jsonl`,
so that an evaluation counts for its checkpoint whether it was made before or after the checkpoint was saved.
"""

from collections.abc import Mapping
from pathlib import Path

from tinypod.experiment import Experiment
from tinypod.runs.metrics import Metrics, MetricsLog, open_metrics


def read_scores(folder: Path, experiment: Experiment) -> dict[int, float]:
    """By step, the last one counts."""
    if experiment.best is None:
        return {}
    name = experiment.best.name
    return {int(row["step"]): row[name] for row in MetricsLog(folder).read() if name in row}


class RunLog:
    """`metrics.jsonl` and its mirrors, from the step that the run resumes at."""

    def __init__(self, folder: Path, experiment: Experiment, scores: dict[int, float], *, primary: bool) -> None:
        self.folder, self.scores, self._primary = folder, scores, primary
        self._config, self._metric = experiment.config, experiment.best.name if experiment.best else ""
        self._metrics: Metrics | None = None

    def open(self, step: int) -> None:
        """Drop what was logged after a step, which will be written again."""
        self.close()
        for later in [known for known in self.scores if known > step]:
            del self.scores[later]
        if self._primary:
            config = self._config.model_dump(mode="json")
            self._metrics = open_metrics(self.folder, self._config.log, config, step)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        if self._metric in row:
            self.scores[step] = row[self._metric]
        if self._metrics is not None:
            self._metrics.write(step, row)

    def flush(self) -> None:
        """Rows that a full disk refused must be there before the checkpoint after them."""
        if self._metrics is not None:
            self._metrics.flush()

    def close(self, *, failed: bool = False) -> None:
        if self._metrics is not None:
            self._metrics.close(failed=failed)
        self._metrics = None
