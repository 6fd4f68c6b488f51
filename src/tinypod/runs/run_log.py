"""The metrics of a run that trains: process 0 writes them.

Scores are the values of the metric that decides which checkpoint is the best, by step. They come from `metrics.jsonl`,
so that an evaluation counts for its checkpoint whether it was made before or after the checkpoint was saved.
"""

from collections.abc import Mapping
from pathlib import Path

from tinypod.experiment import Experiment
from tinypod.runs.folder import Run
from tinypod.runs.metrics import Metrics, MetricsLog, open_metrics


def read_scores(folder: Path, experiment: Experiment) -> dict[int, float]:
    """By step, the last one counts."""
    if experiment.best is None:
        return {}
    name = experiment.best.name
    return {int(record["step"]): record[name] for record in MetricsLog(folder).read() if name in record}


class RunLog:
    """`metrics.jsonl` and its mirrors, from the step that the run resumes at."""

    def __init__(self, run: Run, experiment: Experiment, scores: dict[int, float], *, primary: bool) -> None:
        self.run, self.scores, self._primary = run, scores, primary
        self._config, self._metric = experiment.config, experiment.best.name if experiment.best else ""
        self._metrics: Metrics | None = None

    def open(self, step: int) -> None:
        """Drop what was logged after a step, which will be written again."""
        self.close()
        for later in [known for known in self.scores if known > step]:
            del self.scores[later]
        if self._primary:
            config = self._config.model_dump(mode="json")
            self._metrics = open_metrics(self.run.folder, self._config.log, config, step)

    def write(self, step: int, record: Mapping[str, float]) -> None:
        if self._metric in record:
            self.scores[step] = record[self._metric]
        if self._metrics is not None:
            self._metrics.write(step, record)

    def flush(self) -> None:
        """What a checkpoint holds must be in the log before it, and in the store: a full disk may have refused some."""
        if self._metrics is not None:
            self._metrics.flush()
            self.run.push()

    def close(self, *, failed: bool = False) -> None:
        if self._metrics is not None:
            self._metrics.close(failed=failed)
        self._metrics = None
