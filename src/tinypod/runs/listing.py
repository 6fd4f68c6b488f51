"""What `tinypod runs list` shows: the runs below a folder, each read from its small files.

A run is running while its lock is held or a heartbeat is fresh. If not, `outcome.json` says how a study left it, and
its heartbeats how its processes ended. What cannot be read makes a row that says why. Nothing here waits for JAX.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinypod.errors import UserError
from tinypod.health import goodput, heartbeat
from tinypod.health.heartbeat import Heartbeat
from tinypod.runs import description, metrics, storage
from tinypod.runs.description import Description, read_description
from tinypod.runs.folder import CHECKPOINTS, CONFIG, HEALTH, IMPORTED, Run, open_run
from tinypod.runs.headline import Metric
from tinypod.runs.metrics import MetricsLog
from tinypod.runs.mirrors import Record
from tinypod.runs.status import judge
from tinypod.runs.terminal import short_duration, shorten

OUTCOME = "outcome.json"  # in a run of a study
STUDY = "study.json"  # in the folder of one, which has heartbeats of its own and is no run
_PLACES = ("runs", "studies")  # where `train` and `study run` put them
_DEPTH = 4  # folders down: studies/NAME/runs/RUN
_AT_ONCE = 16  # requests to a store
_NAME_WIDTH = 24  # columns that names have at least, if something else can be left out
State = Literal[
    "running", "done", "early", "stopped", "waiting", "imported", "new", "silent", "crashed", "diverged", "failed",
    "damaged",
]  # fmt: skip
_OUTCOMES: dict[str, State] = {"done": "done", "stopped_early": "early", "diverged": "diverged", "failed": "failed"}
_STYLES = {"running": "cyan", "done": "green", "early": "green"} | dict.fromkeys(
    ("silent", "crashed", "diverged", "failed", "damaged"), "red"
)


class Reading(NamedTuple):
    """What the small files of a run say."""

    config: dict[str, Any]  # as stored; without the schema, because an older version's is read, too
    description: Description
    records: list[Record]
    beats: list[Heartbeat]
    outcome: dict[str, Any]  # of a run of a study

    @property
    def metric(self) -> Metric | None:
        return self.description.headline[0] if self.description.headline else None

    @property
    def step(self) -> int:
        logged = int(self.records[-1]["step"]) if self.records else 0
        return max([logged, int(self.outcome.get("step", 0)), *(beat.step for beat in self.beats)])

    @property
    def steps(self) -> int | None:
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    def scores(self, metric: Metric) -> list[tuple[int, float]]:
        """Held out, by step."""
        found = [(int(record["step"]), record.get(f"eval/{metric.name}", math.nan)) for record in self.records]
        return [(step, value) for step, value in found if math.isfinite(value)]

    def best(self, metric: Metric) -> tuple[int, float] | None:
        sign = 1 if metric.direction == "max" else -1
        return max(self.scores(metric), key=lambda found: (sign * found[1], found[0]), default=None)


@dataclass(frozen=True)
class Entry:
    """A row of the list."""

    name: str
    path: str  # a folder or URL, for other commands
    state: State
    reason: str | None = None
    task: str | None = None
    step: int = 0
    steps: int | None = None
    metric: Metric | None = None
    final: float | None = None
    best: float | None = None
    best_step: int | None = None
    active: float | None = None  # Unix seconds of the last sign of life


def list_runs(target: str | None, now: float) -> list[Entry]:
    """Those below a folder or URL, or else in `runs` and `studies` of the current folder; newest first."""
    base = target or ""
    with storage.explained(base):
        tops = [Path(place) for place in _PLACES] if target is None else [storage.folder(target)]
        if target is not None and not tops[0].is_dir():
            raise UserError(f"{target} is not a folder, or is not there; give one that has runs in it, like runs")
        found = [path for top in tops for path in _find(top, _DEPTH)]
    prefix = "" if target is None else f"{tops[0]}"
    named = [(str(path), str(path).removeprefix(prefix).lstrip("/") or path.name) for path in found]
    with ThreadPoolExecutor(_AT_ONCE if storage.is_remote(base) else 1) as pool:
        entries = list(pool.map(lambda one: read_entry(open_run(one[0]), one[1], now), named))
    return sorted(entries, key=lambda entry: (-(entry.active or 0.0), entry.name))


def _find(folder: Any, depth: int) -> Iterator[Any]:
    """Run folders at or below one, with one listing a folder."""
    try:
        names = sorted(child.name for child in folder.iterdir())
    except (NotADirectoryError, FileNotFoundError):
        return
    except PermissionError:
        yield folder  # its row says so
        return
    if {CONFIG, metrics.FILE, OUTCOME, CHECKPOINTS} & {*names} or (HEALTH in names and STUDY not in names):
        yield folder
    elif depth:
        for name in names:
            if not name.startswith("."):
                yield from _find(folder / name, depth - 1)


def read_entry(run: Run, name: str, now: float) -> Entry:
    path = str(run)
    try:
        found = read(run)
    except (UserError, OSError) as error:
        return Entry(name, path, "damaged", str(error).removeprefix(f"{run.folder}/"), active=_last_change(run))
    state, reason = judge_state(run, found, now)
    task, metric = found.config.get("task"), found.metric
    scores = found.scores(metric) if metric else []
    best = found.best(metric) if metric else None
    seen = [beat.time for beat in found.beats] + [record["time"] for record in found.records[-1:]]
    return Entry(
        name,
        path,
        state,
        reason,
        task=task.get("kind") if isinstance(task, dict) else None,
        step=found.step,
        steps=found.steps,
        metric=metric,
        final=scores[-1][1] if scores else None,
        best=best[1] if best else None,
        best_step=best[0] if best else None,
        active=max(seen, default=0.0) or _last_change(run),
    )


def read(run: Run) -> Reading:
    """UserError or OSError where something is damaged, or the folder is no run."""
    if run.remote is not None:
        for name in (CONFIG, metrics.FILE, description.FILE, OUTCOME, IMPORTED, goodput.FILE):
            run.fetch(name)
        run.pull_heartbeats()
    beats, outcome = heartbeat.read_heartbeats(run.folder / HEALTH), read_outcome(run)
    if not (run.folder / CONFIG).exists() and not beats and not outcome:
        raise UserError(f"{run} is not a run folder: it has no {CONFIG}")
    return Reading(_read_config(run), read_description(run), MetricsLog(run.folder).read(), beats, outcome)


def _read_config(run: Run) -> dict[str, Any]:
    path = run.folder / CONFIG
    if not path.exists():  # it has begun, and has not come that far
        return {}
    try:
        tree = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of keys at the top, found {type(tree).__name__}")
    return tree


def read_outcome(run: Run) -> dict[str, Any]:
    """Of a run of a study."""
    path = run.folder / OUTCOME
    try:
        outcome = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    known = (("step", 0, int), ("state", "", str), ("reason", None, (str, type(None))))
    if not isinstance(outcome, dict) or not all(isinstance(outcome.get(n, v), kind) for n, v, kind in known):
        raise UserError(f"{path}: not the outcome of a run")
    return outcome


def judge_state(run: Run, found: Reading, now: float) -> tuple[State, str | None]:
    """And why, where that is not plain."""
    processes = judge(found.beats, now)
    if run.is_locked() or any(process.alive for process in processes):
        return "running", None
    if (outcome := found.outcome.get("state")) in _OUTCOMES:
        return _OUTCOMES[outcome], found.outcome.get("reason")
    if not found.beats:
        return _without_heartbeats(run, found), None
    ends = [beat.ended for beat in found.beats if beat.ended is not None]
    if failed := [ended for ended in ends if ended.startswith("failed")]:
        return "failed", failed[0].removeprefix("failed: ")
    verdicts = {process.verdict for process in processes}
    lost: dict[str, State] = {"gone": "crashed", "silent": "silent", "unreadable": "damaged"}
    for verdict, state in lost.items():
        if verdict in verdicts:
            return state, heartbeat.unwell(found.beats, 0, now)[0]
    return ("done" if set(ends) == {"done"} else "stopped"), None


def _without_heartbeats(run: Run, found: Reading) -> State:
    """In a pack, they are the study's."""
    if found.outcome:
        if found.outcome.get("state") == "running":
            return "running" if run.remote is not None else "crashed"  # here, its lock would be held
        return "stopped" if found.step else "waiting"
    if found.steps is not None and found.step >= found.steps:
        return "done"
    return "imported" if (run.folder / IMPORTED).exists() else "stopped" if found.step else "new"


def _last_change(run: Run) -> float | None:
    for name in (CONFIG, metrics.FILE, "."):
        with suppress(OSError):
            return (run.folder / name).stat().st_mtime
    return None


def as_json(entries: Sequence[Entry], now: float) -> list[dict[str, Any]]:
    return [
        asdict(entry)
        | {"metric": f"eval/{entry.metric.name}" if entry.metric else None}
        | {"age_s": None if entry.active is None else max(0.0, now - entry.active)}
        for entry in entries
    ]


def render(entries: Sequence[Entry], now: float, width: int) -> RenderableType:
    """For a terminal of 60 columns or more; names are shortened in the middle to fit."""
    counts = Counter(entry.state for entry in entries)
    title = f"{len(entries)} run{'s' if len(entries) != 1 else ''}: "
    title += ", ".join(f"{count} {state}" for state, count in counts.most_common())
    for whole in (True, False):
        columns = _columns(entries, now, whole=whole)
        taken = sum(max(map(len, (name, *cells))) + 2 for name, cells in columns.items())
        if width - taken >= min(_NAME_WIDTH, max(len(entry.name) for entry in entries)):
            break
    columns = {"run": [shorten(entry.name, max(width - taken, 10)) for entry in entries]} | columns
    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for name in columns:
        left = name in ("run", "state", "metric")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for entry, cells in zip(entries, zip(*columns.values(), strict=True), strict=True):
        style = {"state": _STYLES.get(entry.state, "")}
        table.add_row(*(Text(cell, style.get(name, "")) for name, cell in zip(columns, cells, strict=True)))
    notes = [Text(f"{e.name} {e.state}: {e.reason}", "yellow") for e in entries if e.reason]
    return Group(Text(title, "bold"), table, *notes)


def _columns(entries: Sequence[Entry], now: float, *, whole: bool) -> dict[str, list[str]]:
    """Besides the names; `whole`: the steps that a run will have, too."""
    labels = {entry.metric.label for entry in entries if entry.metric}
    columns = {"state": [str(entry.state) for entry in entries]}
    columns["step"] = [f"{e.step:,}" + (f"/{e.steps:,}" if whole and e.steps is not None else "") for e in entries]
    if len(labels) > 1:
        columns["metric"] = [entry.metric.label if entry.metric else "" for entry in entries]
    columns[labels.pop() if len(labels) == 1 else "last"] = [_show_score(entry, entry.final) for entry in entries]
    columns["best"] = [_show_score(entry, entry.best) for entry in entries]
    columns["age"] = ["" if e.active is None else short_duration(now - e.active) for e in entries]
    return columns


def _show_score(entry: Entry, value: float | None) -> str:
    return "" if value is None or entry.metric is None else entry.metric.show(value)
