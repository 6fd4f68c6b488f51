"""What `tinypod runs compare` shows: the config keys in which runs differ, what each has reached, and their curves in
one picture. Runs have letters, so that columns stay narrow; what does not fit beside each other is stacked."""

import json
import statistics
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinypod.errors import UserError
from tinypod.health import goodput
from tinypod.runs import curves
from tinypod.runs.folder import Run, open_run
from tinypod.runs.headline import Metric
from tinypod.runs.listing import Reading, State, judge_state, read
from tinypod.runs.terminal import duration, shorten

_ABSENT = "–"  # a key that the other run's version or kind does not have


class Compared(NamedTuple):
    name: str  # as it was given
    run: Run
    reading: Reading
    state: State

    @property
    def seconds(self) -> float | None:
        """Over all its starts; of a run that was trained in a pack, its share."""
        spent = goodput.summarise(self.run.folder).total_s
        return spent or self.reading.outcome.get("seconds") or None

    @property
    def examples_per_s(self) -> float | None:
        speeds = [record["perf/examples_per_s"] for record in self.reading.records if "perf/examples_per_s" in record]
        return statistics.median(speeds) if speeds else None

    @property
    def train_loss(self) -> float | None:
        return next((r["train/loss"] for r in reversed(self.reading.records) if "train/loss" in r), None)


class Comparison(NamedTuple):
    runs: list[Compared]
    config: dict[str, list[Any]]  # keys that differ; a value for each run, or _ABSENT
    metrics: tuple[Metric, ...]  # headline metrics that all of them report

    def draw(self, path: Path) -> Path | None:
        """None: nothing was logged."""
        records = {one.name: one.reading.records for one in self.runs}
        return curves.plot_together(path, records, self.metrics[0] if self.metrics else None)


def compare(targets: Sequence[str], now: float) -> Comparison:
    if len(targets) < 2:
        raise UserError(
            "compare takes two runs or more, like `tinypod runs compare runs/a runs/b`; `tinypod runs status RUN` "
            "shows a single one"
        )
    runs, places = [], set()
    for target in targets:
        run = open_run(target)
        place = run.remote or str(run.folder.resolve())
        if place in places:
            raise UserError(f"{target} is given twice; give each run once")
        places.add(place)
        reading = read(run)
        runs.append(Compared(str(target).rstrip("/"), run, reading, judge_state(run, reading, now)[0]))
    leaves = [_leaves(one.reading.config) for one in runs]
    kinds = {of_run.get("task.kind"): one.name for of_run, one in zip(leaves, runs, strict=True)}
    if len(kinds) > 1:
        listed = ", ".join(f"{name} is of {kind!r}" for kind, name in kinds.items())
        raise UserError(f"these runs have tasks of different kinds, whose scores cannot be compared: {listed}")
    rows = {key: [of_run.get(key, _ABSENT) for of_run in leaves] for key in dict.fromkeys(k for x in leaves for k in x)}
    config = {key: values for key, values in rows.items() if any(value != values[0] for value in values)}
    first, *others = [one.reading.description.headline for one in runs]
    return Comparison(runs, config, tuple(m for m in first if all(m in headline for headline in others)))


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; a list is one value."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    return {
        key: value
        for name, part in tree.items()
        for key, value in _leaves(part, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def as_json(found: Comparison) -> dict[str, Any]:
    runs = []
    for one in found.runs:
        scores = {}
        for metric in found.metrics:
            values, best = one.reading.scores(metric), one.reading.best(metric)
            if best is not None:
                scores[f"eval/{metric.name}"] = {"final": values[-1][1], "best": best[1], "best_step": best[0]}
        runs.append(
            {"name": one.name, "path": str(one.run), "state": one.state, "step": one.reading.step}
            | {"steps": one.reading.steps, "scores": scores, "seconds": one.seconds}
            | {"examples_per_s": one.examples_per_s, "num_weights": one.reading.description.num_weights}
        )
    config = {key: [None if value is _ABSENT else value for value in values] for key, values in found.config.items()}
    return {"runs": runs, "config": config}


def render(found: Comparison, width: int) -> RenderableType:
    letters = [*string.ascii_uppercase, *map(str, range(27, len(found.runs) + 1))][: len(found.runs)]
    legend = [
        Text(f"{letter}  {shorten(one.name, width - 4)}") for letter, one in zip(letters, found.runs, strict=True)
    ]
    differ = {key: [_show(value) for value in values] for key, values in found.config.items()}
    title = "config keys that differ" if differ else "their configs are the same"
    return Group(
        *legend,
        Text(f"\n{title}", "bold"),
        *([_differences(letters, differ, width)] if differ else []),
        Text("\nwhat they reached", "bold"),
        *(block.table for block in _blocks(letters, _results(found), width)),
    )


def _results(found: Comparison) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {"state": [one.state for one in found.runs]}
    rows["step"] = [f"{one.reading.step:,}" for one in found.runs]
    for metric in found.metrics[:2]:
        scores = [one.reading.scores(metric) for one in found.runs]
        rows[f"held-out {metric.label}"] = [metric.show(values[-1][1]) if values else "" for values in scores]
    for metric in found.metrics[:1]:
        best = [one.reading.best(metric) for one in found.runs]
        rows[f"best {metric.label}"] = [metric.show(one[1]) if one else "" for one in best]
        rows["at step"] = [f"{one[0]:,}" if one else "" for one in best]
    for name, values, show in (
        ("training loss", [one.train_loss for one in found.runs], "{:.4g}".format),
        ("time", [one.seconds for one in found.runs], duration),
        ("examples/s", [one.examples_per_s for one in found.runs], "{:,.4g}".format),
        ("weights", [one.reading.description.num_weights for one in found.runs], "{:,}".format),
    ):
        rows[name] = ["" if value is None else show(value) for value in values]
    return {name: cells for name, cells in rows.items() if any(cells)}


def _differences(letters: Sequence[str], rows: dict[str, list[str]], width: int) -> RenderableType:
    """A column for each run if that fits; otherwise each key with its values below it, equal ones together."""
    if len(blocks := _blocks(letters, rows, width)) == 1 and blocks[0].width <= width:
        return blocks[0].table
    parts: list[RenderableType] = []
    for key, cells in rows.items():
        shared: dict[str, list[str]] = {}
        for letter, cell in zip(letters, cells, strict=True):
            shared.setdefault(cell, []).append(letter)
        stacked = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
        stacked.add_column(max_width=width // 3)
        stacked.add_column(overflow="fold")  # a path is never cut
        for cell, who in shared.items():
            stacked.add_row(Text(f"  {' '.join(who)}"), Text(cell))
        parts += [Text(key), stacked]
    return Group(*parts)


class _Block(NamedTuple):
    table: Table
    width: int


def _blocks(letters: Sequence[str], rows: dict[str, list[str]], width: int) -> list[_Block]:
    """Tables with a column for each run, as many in each as fit."""
    keys, columns = max(map(len, rows)), list(zip(*rows.values(), strict=True))
    blocks: list[_Block] = []
    start = 0
    while start < len(letters):
        stop, taken = start, keys
        while stop < len(letters) and (stop == start or taken + max(map(len, columns[stop])) + 2 <= width):
            taken += max(map(len, columns[stop])) + 2
            stop += 1
        table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
        for name in ("", *letters[start:stop]):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for key, cells in rows.items():
            table.add_row(Text(key), *map(Text, cells[start:stop]))
        blocks.append(_Block(table, taken))
        start = stop
    return blocks


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
