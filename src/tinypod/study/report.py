"""`tinypod study report`: what a study found, as a page, a Markdown file, pictures and numbers.

Everything goes to `report/` in the study's folder and is made anew each time, from the runs' logs alone: a study that
is still running can be reported on, and the report says that it is.
"""

from pathlib import Path
from typing import Any

from rich.console import Console

from tinypod.runs.storage import replace_file
from tinypod.runs.terminal import say
from tinypod.study import page
from tinypod.study.answers import Analysis, analyse
from tinypod.study.figures import all_plots, write_csv
from tinypod.study.findings import sentences
from tinypod.study.results import read_study
from tinypod.study.tables import all_tables, plain_markdown

FOLDER, PAGE, MARKDOWN, RUNS = "report", "report.html", "report.md", "runs.csv"
_OURS = ("final", "grid", "curves", "train_curves", "loss", "cost_", "scaling_", "critical_batch_")


def write_report(folder: Path, console: Console) -> Path:
    """The page's path. The short answers are printed too."""
    analysis = analyse(read_study(folder))
    findings, tables, plots = sentences(analysis), all_tables(analysis), all_plots(analysis)
    files: dict[str, bytes] = {}
    for plot in plots:
        files[f"{plot.name}.png"], files[f"{plot.name}.csv"] = plot.png(), plot.csv().encode()
    files[RUNS] = _runs_csv(analysis).encode()
    bullets = "\n".join(f"- {plain_markdown(finding)}" for finding in findings)
    parts = [f"# {plain_markdown(analysis.file.name)}", bullets, *(table.markdown() for table in tables.values())]
    files[MARKDOWN] = ("\n\n".join(parts) + "\n").encode()
    files[PAGE] = page.render(analysis, findings, tables, plots).encode()
    target = folder / FOLDER
    for name, content in files.items():
        replace_file(target / name, content)
    # A figure of an earlier report that this one has no data for would seem to belong to it.
    for path in target.iterdir():
        if path.suffix in (".png", ".csv") and path.name.startswith(_OURS) and path.name not in files:
            path.unlink()
    for finding in findings:
        say(console, finding)
    say(console, f"report: {target / PAGE}")
    return target / PAGE


def _runs_csv(analysis: Analysis) -> str:
    """One line a run, numbers in full."""
    factors = list(analysis.file.factors)
    columns = ["run", "variant", *factors, "seed", "state", "counts", "step", "final", "best"]
    columns += ["train", "steps_to_target", "seconds_to_target", "weights", "flops", "seconds", "packed", "reason"]
    rows: list[list[Any]] = []
    for run in analysis.runs:
        entry, outcome, target = run.entry, run.outcome, analysis.file.target
        reached = None if target is None else run.step_reaching(target)
        scores = [run.final, run.best] if len(run.metric) else [None, None]
        row: list[Any] = [entry.name, entry.variant, *(entry.levels.get(key) for key in factors), entry.seed]
        row += [outcome.state, run.counts, outcome.step, *scores, run.gap[0] if run.gap else None]
        row += [reached, None if reached is None else run.seconds_at(reached), entry.num_weights, run.flops]
        rows.append([*row, run.seconds, outcome.packed, outcome.reason])
    return write_csv(columns, rows)
