"""How the runs of a study stand, as a table."""

from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from tinypod.runs.metrics import MetricsLog
from tinypod.runs.terminal import Listing
from tinypod.study.folder import Outcome, read_outcome, read_study, run_of


class Row(NamedTuple):
    name: str
    outcome: Outcome
    step: int
    latest: float | None  # of the study's metric
    best: float | None


def read_rows(folder: Path) -> tuple[dict[str, Any], list[Row]]:
    study = read_study(folder)
    pick = max if study["direction"] == "max" else min
    rows = []
    for described in study["runs"]:
        run = run_of(folder, described["name"])
        records = MetricsLog(run.folder).read()
        scores = [record[study["metric"]] for record in records if study["metric"] in record]
        outcome = read_outcome(run)
        step = int(records[-1]["step"]) if records else outcome.step
        rows.append(
            Row(described["name"], outcome, step, scores[-1] if scores else None, pick(scores) if scores else None)
        )
    return study, rows


def table(folder: Path) -> RenderableType:
    study, rows = read_rows(folder)
    shown = {state: sum(row.outcome.state == state for row in rows) for state in ("done", "running", "waiting")}
    ended = len(rows) - sum(shown.values())
    title = ", ".join(f"{count} {state}" for state, count in shown.items() if count)
    title += f", {ended} ended otherwise" if ended else ""
    columns = ("run", "state", "step", study["metric_label"], "best")
    found = Listing(f"{study['name']}: {title}", columns, left=("state",))
    for row in rows:
        state = row.outcome.state.replace("_", " ")
        values = ["" if value is None else format(value, study["metric_format"]) for value in (row.latest, row.best)]
        found.add_row(row.name, state, f"{row.step:,}", *values)
    reasons = (f"{row.name}: {row.outcome.reason}" for row in rows if row.outcome.reason)
    return Group(found, *(Text(reason, style="yellow") for reason in reasons))
