"""Tables of what a run has reached, by the headline metrics of its task."""

import statistics
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from tinypod.experiment import Experiment
from tinypod.runs.folder import Run
from tinypod.runs.metrics import MetricsLog
from tinypod.tasks.task import Task


def scores_table(title: str, task: Task, scores: Mapping[str, float]) -> Table:
    """Scores over everything, and by part where the task tells parts apart (`exact_accuracy/NAME`)."""
    table = Table(title=Text(title), title_justify="left")
    parts = [name.removeprefix("count/") for name in scores if name.startswith("count/")]
    table.add_column("source")
    headline = [metric for metric in task.headline if metric.name in scores]
    for name in (task.unit, *(metric.label for metric in headline)):
        table.add_column(name, justify="right")
    for part in [*parts, None]:
        end = f"/{part}" if part else ""
        values = (metric.show(scores[metric.name + end]) for metric in headline)
        table.add_row(Text(part or "all"), f"{scores['count' + end]:,.0f}", *values)
    return table


def summary_table(run: Run, experiment: Experiment, step: int, best: tuple[int, float] | None) -> Table:
    """What `tinypod train` shows at its end."""
    last: dict[str, Any] = {}  # the last value of each metric
    records = MetricsLog(run.folder).read()
    for record in records:
        last |= record
    table = Table(title=Text(str(run)), show_header=False, title_justify="left")
    table.add_row("steps done", f"{step:,}")
    for metric in experiment.task.headline[:2]:
        if f"eval/{metric.name}" in last:
            table.add_row(f"held-out {metric.label}", metric.show(last[f"eval/{metric.name}"]))
    if best is not None and experiment.best is not None:
        table.add_row("best checkpoint", f"step {best[0]:,} ({experiment.best.label} {experiment.best.show(best[1])})")
    if "train/loss" in last:
        table.add_row("last loss", f"{last['train/loss']:,.4g}")
    if speeds := [record["perf/examples_per_s"] for record in records if "perf/examples_per_s" in record]:
        table.add_row("examples/s", f"{statistics.median(speeds):,.4g}")
    table.add_row("curves", Text(str(run.folder / "curves.png")))
    return table
