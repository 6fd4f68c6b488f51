"""Tables of what a run has reached, by the headline metrics of its task."""

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from tinypod.experiment import Experiment
from tinypod.runs.folder import Run
from tinypod.runs.metrics import MetricsLog
from tinypod.runs.terminal import Listing, amount, facts
from tinypod.tasks.task import Task


def scores_table(title: str, task: Task, scores: Mapping[str, float]) -> Listing:
    """Scores over everything, and by part where the task tells parts apart (`exact_accuracy/NAME`)."""
    parts = [name.removeprefix("count/") for name in scores if name.startswith("count/")]
    headline = [metric for metric in task.headline if metric.name in scores]
    table = Listing(title, ("source", task.unit, *(metric.label for metric in headline)))
    for part in [*parts, None]:
        end = f"/{part}" if part else ""
        values = (metric.show(scores[metric.name + end]) for metric in headline)
        table.add_row(Text(part or "all"), f"{scores['count' + end]:,.0f}", *values)
    return table


def summary_table(run: Run, experiment: Experiment, step: int, best: tuple[int, float] | None) -> RenderableType:
    """What `tinypod train` shows at its end."""
    last: dict[str, Any] = {}  # the last value of each metric
    records = MetricsLog(run.folder).read()
    for record in records:
        last |= record
    found: list[tuple[str, str]] = [("steps done", f"{step:,}")]
    found += [
        (f"held-out {metric.label}", metric.show(last[f"eval/{metric.name}"]))
        for metric in experiment.task.headline[:2]
        if f"eval/{metric.name}" in last
    ]
    if best is not None and experiment.best is not None:
        reached = f"{experiment.best.label} {experiment.best.show(best[1])}"
        found.append(("best checkpoint", f"step {best[0]:,} ({reached})"))
    if "train/loss" in last:
        found.append(("last loss", f"{last['train/loss']:.3f}"))
    if speeds := [record["perf/examples_per_s"] for record in records if "perf/examples_per_s" in record]:
        found.append(("examples/s", amount(statistics.median(speeds))))
    found.append(("curves", str(run.folder / "curves.png")))
    return facts(found, str(run))
