"""When a run of a study ends before its last step: by rules in the study file, asked after each evaluation with the
scores of all runs that were scored at that step. What they decide stands in the run's outcome and in the report."""

import math
import statistics
from collections.abc import Mapping
from contextlib import suppress

from tinypod.errors import StorageError
from tinypod.runs.folder import Run
from tinypod.runs.metrics import MetricsLog
from tinypod.study.file import Study
from tinypod.study.folder import read_study, refresh, run_of


class Rules:
    """`rules(step, scores)`: of runs by name, the value of the metric at a step -> why some of them end there."""

    def __init__(self, study: Study, place: Run) -> None:
        self.study, self.place, self.wanted = study, place, study.file.stop
        described = read_study(place.folder)
        self.metric, self.sign = described["metric"], 1.0 if described["direction"] == "max" else -1.0
        self.shown = described["metric_format"]
        self.rungs = study.file.search.rungs if study.file.search is not None else {}

    def __call__(self, step: int, scores: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        if self.wanted is None and not self.rungs:
            return {}
        with suppress(StorageError):  # other machines train some of the runs, perhaps; what is known of them must do
            refresh(self.place)
        now = {name: self.sign * values[self.metric] for name, values in scores.items()}
        history = {run.name: self._history(run.name) for run in self.study.runs}
        for name, value in now.items():
            history[name][step] = value
        found: dict[str, str] = {}
        for name, value in now.items():
            why = self._ends(step, value, history[name], [past[step] for past in history.values() if step in past])
            if why is not None:
                found[name] = why
        return found

    def _ends(self, step: int, value: float, past: Mapping[int, float], peers: list[float]) -> str | None:
        """Values are larger where they are better."""
        wanted, target = self.wanted, self.study.file.target
        if wanted is not None:
            if wanted.at_target and target is not None and value >= self.sign * target:
                return f"the target of {target:{self.shown}} was reached"
            if wanted.no_progress is not None:
                values = [past[at] for at in sorted(past) if at <= step]
                best_at = max(range(len(values)), key=lambda i: values[i])
                if len(values) - 1 - best_at >= wanted.no_progress:
                    return f"no progress in {wanted.no_progress} evaluations"
            if wanted.below_median_from is not None and step >= wanted.below_median_from and len(peers) > 2:
                median = statistics.median(peers)
                if value < median:
                    return f"worse than the median of {len(peers)} runs at this step, {self.sign * median:{self.shown}}"
        if step in self.rungs:
            kept = max(1, math.ceil(self.rungs[step] * len(peers)))
            if sum(peer > value for peer in peers) >= kept:
                return f"not among the best {kept} of {len(peers)} at step {step:,}"
        return None

    def _history(self, name: str) -> dict[int, float]:
        records = MetricsLog(run_of(self.place.folder, name).folder).read()
        return {int(record["step"]): self.sign * record[self.metric] for record in records if self.metric in record}
