"""What the page is told of runs. They are found by looking into the folders that the user named, and known to the page
by an id: nothing that a browser sends is ever part of a path. Reads files only, and starts no device."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tinypod.errors import UserError
from tinypod.health import heartbeat
from tinypod.runs import listing, status, storage
from tinypod.runs.description import Description
from tinypod.runs.folder import CHECKPOINTS, CONFIG, HEALTH, Run
from tinypod.runs.metrics import FILE as METRICS
from tinypod.runs.pieces import UNPACKING
from tinypod.runs.release import Release, open_release, shipped

MAX_DEPTH = 4  # folders below the one named: studies/NAME/runs/RUN
MAX_RUNS = 500
CURVES = ("train/loss", "train/learning_rate", "perf/examples_per_s")  # and the metric that decides the best checkpoint
RELEASE = "release"  # in place of a run's state
NOT_FINITE = ("nan", "inf", "-inf")  # as they stand in metrics.jsonl


class UnknownRunError(Exception):
    """An id that no run has, or no longer."""


@dataclass
class _Log:
    """As much of a run's `metrics.jsonl` as was read. A run that resumes may replace it by a shorter one: then it is
    read again from the start, as a new generation."""

    inode: int = 0
    offset: int = 0
    generation: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    def update(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.offset:
                    self.inode, self.offset, self.records = stat.st_ino, 0, []
                    self.generation += 1
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # what comes after the last newline is still being written
        self.offset += len(whole)
        self.records += filter(None, map(_record, whole.splitlines()))


def _record(line: bytes) -> dict[str, Any] | None:
    """None for a line that is no record: the page shows the others."""
    try:
        record = json.loads(line, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return {name: value for name, value in record.items() if type(value) in (int, float) or value in NOT_FINITE}


class Runs:
    """The runs below some folders, and what was read of them so far; and releases, which have a board alone."""

    def __init__(self, folders: list[Path], releases: list[Release] | None = None) -> None:
        self.folders = folders
        self._releases = {_id(release.path.resolve()): release for release in releases or []}
        self._lock = threading.Lock()
        self._found: dict[str, tuple[str, Path]] = {}  # name and folder
        self._logs: dict[str, _Log] = {}
        self._configs: dict[Path, tuple[int, dict[str, Any]]] = {}

    def listing(self) -> list[dict[str, Any]]:
        """Looks again for runs; the ones with the latest news first, and releases last."""
        with self._lock:
            self._found = dict(_search(self.folders))
            rows = [self._row(key, name, folder) for key, (name, folder) in self._found.items()]
        rows += [_release_row(key, release) for key, release in self._releases.items()]
        return sorted(rows, key=lambda row: (row["state"] == RELEASE, row["age_s"], row["name"]))

    def source(self, key: str) -> Path:
        """What has the weights: a run's folder, or a release's file."""
        return self._releases[key].path if key in self._releases else self.folder(key)

    def folder(self, key: str) -> Path:
        with self._lock:
            if key not in self._found:
                self._found = dict(_search(self.folders))
            if key not in self._found:
                raise UnknownRunError
            return self._found[key][1]

    def metrics(self, key: str, generation: int, since: int) -> dict[str, Any]:
        """The records after the first `since` of a generation; all of them where it is another one by now."""
        folder = self.folder(key)
        with self._lock:
            log, headline = self._log(key, folder), _headline(self._config(folder))
            names = {"step", "time", *CURVES, *([headline] if headline else [])}
            news = log.records[since if generation == log.generation else 0 :]
            kept = [{name: value for name, value in record.items() if name in names} for record in news]
            return {"generation": log.generation, "total": len(log.records), "records": kept, "headline": headline}

    def health(self, key: str) -> dict[str, Any]:
        folder = self.folder(key)
        found = status.as_json(status.read_status(folder, time.time()))
        with self._lock:
            records = self._log(key, folder).records
            skipped = sum(record["train/skipped"] for record in records if _number(record.get("train/skipped")))
            broken = sum(record.get("train/loss") in NOT_FINITE for record in records)
        return found | {"skipped": skipped, "nonfinite": broken}

    def differences(self, keys: list[str]) -> list[dict[str, Any]]:
        """The config keys in which these runs differ, with a value for each."""
        folders = [self.folder(key) for key in keys]
        with self._lock:
            flat = [dict(_leaves(self._config(folder))) for folder in folders]
        names = dict.fromkeys(name for config in flat for name in config)
        rows = [{"key": name, "values": [config.get(name) for config in flat]} for name in names]
        return [row for row in rows if any(value != row["values"][0] for value in row["values"])]

    def _row(self, key: str, name: str, folder: Path) -> dict[str, Any]:
        config, log = self._config(folder), self._log(key, folder)
        now, run, headline = time.time(), Run(folder), _headline(config)
        beats = heartbeat.read_heartbeats(folder / HEALTH)
        found = listing.Reading(config, Description(), log.records, beats, _outcome(run))
        values = [record[headline] for record in log.records if headline in record]
        times = [beat.time for beat in beats] + [record.get("time", 0.0) for record in log.records[-1:]]
        times = [when for when in times if _number(when)]
        return {
            "id": key,
            "name": name,
            "state": _state(run, found, now),
            "step": found.step,
            "steps": found.steps,
            "headline": headline,
            "value": values[-1] if values else None,
            "age_s": max(0.0, now - (max(times, default=0.0) or _changed(folder))),
            "puzzle": _section(config, "task").get("kind") == "puzzle",
        }

    def _log(self, key: str, folder: Path) -> _Log:
        log = self._logs.setdefault(key, _Log())
        log.update(folder / METRICS)
        return log

    def _config(self, folder: Path) -> dict[str, Any]:
        """Without the schema: an older version's can be shown too. Parsed again only where it has changed."""
        path = folder / CONFIG
        try:
            stamp = path.stat().st_mtime_ns
            if self._configs.get(path, (None,))[0] != stamp:
                tree = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
                self._configs[path] = stamp, tree if isinstance(tree, dict) else {}
            return self._configs[path][1]
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return {}


def _release_row(key: str, release: Release) -> dict[str, Any]:
    about = release.about
    headline = f"eval/{about.headline[0].name}" if about.headline else None
    return {
        "id": key,
        "name": str(release),
        "state": RELEASE,
        "step": about.step,
        "steps": None,
        "headline": headline,
        "value": about.scores.get(headline or ""),
        "age_s": 0.0,
        "puzzle": True,
    }


def _id(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _search(folders: list[Path]) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Ids, and the names and folders of runs. A link that leads out of the folder named is not followed."""
    found = 0
    for top in folders:
        inside = top.resolve()
        for here, below, files in os.walk(inside):
            below[:] = [name for name in below if not name.endswith(UNPACKING)]
            folder = Path(here)
            if CONFIG in files and any(name in (*files, *below) for name in (METRICS, HEALTH, CHECKPOINTS)):
                below.clear()
                links = (folder / CONFIG, folder / METRICS, folder / HEALTH, folder / CHECKPOINTS)
                if all(path.resolve().is_relative_to(inside) for path in links):
                    found += 1
                    relative = folder.relative_to(inside)
                    name = inside.name if not relative.parts else str(relative if len(folders) == 1 else top / relative)
                    yield _id(folder), (name, folder)
            if len(folder.relative_to(inside).parts) >= MAX_DEPTH:
                below.clear()
            if found >= MAX_RUNS:
                return


def _state(run: Run, found: listing.Reading, now: float) -> str:
    """As `tinypod runs list` says it; of one that runs, also whether it lags."""
    state, _ = listing.judge_state(run, found, now)
    slow = any(process.verdict in ("lagging", "slow") for process in status.judge(found.beats, now))
    return "lagging" if state == "running" and slow else state


def _outcome(run: Run) -> dict[str, Any]:
    with suppress(UserError, OSError):  # the page shows the rest
        return listing.read_outcome(run)
    return {}


def _headline(config: dict[str, Any]) -> str | None:
    """The held-out metric that decides which checkpoint is the best."""
    best = _section(config, "checkpoint").get("best")
    name = best.get("metric") if isinstance(best, dict) else None
    return name if isinstance(name, str) else None


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, default=str)


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _changed(folder: Path) -> float:
    try:
        return (folder / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def open_places(names: list[str]) -> tuple[list[Path], list[Release]]:
    """The folders that a user named, and the releases: those shipped, then those named. Without a name, `runs` and
    `studies`, of which one must be there unless there is a release to show."""
    known = shipped()
    releases = {path.resolve(): open_release(path) for path in known.values()}
    folders = []
    for name in names or [name for name in ("runs", "studies") if Path(name).is_dir()]:
        if storage.is_remote(name):
            raise UserError(f"{name}: runs in an object store are not shown; `tinypod runs status {name}` looks at one")
        if Path(name).is_file():
            releases[Path(name).resolve()] = open_release(Path(name))
        elif Path(name).is_dir():
            folders.append(Path(name))
        elif name not in known:
            raise UserError(
                f"{name}: no such folder. Give the folder that your runs are in, e.g. runs, or a release file"
            )
    if not folders and not releases:
        raise UserError("runs: no such folder. Give the folder that your runs are in, or a release file")
    return folders, list(releases.values())
