"""A run is a folder: `config.yaml`, `metrics.jsonl`, `checkpoints/`, `curves.png`, and mirrors of the metrics.

A run in an object store (`gs://bucket/runs/x`) writes its checkpoints there directly. Its small files are in a working
folder on this host, copied from the store at the start (`pull`) and to it before each checkpoint (`push`): whatever a
checkpoint holds is in the store's `metrics.jsonl` before the checkpoint is visible.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinypod import config as configs
from tinypod.config import Config
from tinypod.errors import UserError
from tinypod.runs import storage
from tinypod.runs.set_aside import SET_ASIDE

if TYPE_CHECKING:  # whoever only looks at run folders does not wait for JAX
    from tinypod.experiment import ExperimentConfig

CONFIG, CHECKPOINTS, HEALTH, LOCK = "config.yaml", "checkpoints", "health", ".lock"
IMPORTED = "imported.json"  # in a run that did not begin with weights of its own
# W&B keeps its own copy, and many files; `runs` are those of a study, each a run for itself
NOT_PUSHED = (CHECKPOINTS, SET_ASIDE, "wandb", "runs")
_LOOKS = 10  # at a lock, in half a second
NOT_PULLED = (*NOT_PUSHED, "tensorboard", "profile", "logs")  # what a run writes and does not read


class LockedError(UserError):
    """Another process on this host trains the run."""


@dataclass(frozen=True)
class Run:
    """Where a run is."""

    folder: Path  # the small files
    remote: str | None = None  # "gs://bucket/runs/x" when the run lives in an object store
    _in_store: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    guards: list[Callable[[], None]] = field(default_factory=list, compare=False, repr=False)  # before each copy to it

    def __str__(self) -> str:
        return self.remote or str(self.folder)

    @property
    def checkpoints(self) -> Path | str:
        return self.folder / CHECKPOINTS if self.remote is None else f"{self.remote}/{CHECKPOINTS}"

    def pull(self, locked: bool = False) -> None:
        """Make the working folder equal to the store, once per host; `locked` by whoever holds `lock`.

        What an earlier life of the run left here and did not push is dropped: no checkpoint knows of it. While the run
        is being trained on this host its working folder is ahead of the store, and stays as it is.
        """
        if self.remote is None or (not locked and self.is_locked()):
            return
        with storage.explained(self.remote):
            there = storage.folder(self.remote)
            names = [name for name in storage.files_under(there) if _is_small_file(name, NOT_PULLED)]
            for name in names:
                storage.inside(self.folder, name)
            for name in set(self._small_files(NOT_PULLED)) - set(names):
                (self.folder / name).unlink(missing_ok=True)
            for name in names:
                self._write(name, storage.read_whole(there / name))
                self._in_store[name] = self._stamp(name)

    def fetch(self, name: str) -> None:
        """Bring one small file from the store, unless the run is being trained on this host."""
        if self.remote is None or self.is_locked():
            return
        content = None
        with storage.explained(f"{self.remote}/{name}"), suppress(FileNotFoundError):
            content = storage.read_whole(storage.folder(self.remote) / name)
        if self.is_locked():  # by now: what is here may be newer
            return
        if content is None:
            (self.folder / name).unlink(missing_ok=True)
        else:
            self._write(name, content)
            self._in_store[name] = self._stamp(name)

    def pull_heartbeats(self) -> None:
        """Those of other hosts, where they are newer than what is here; also while the run is being trained."""
        if self.remote is None:
            return
        with storage.explained(self.remote):
            there = storage.folder(self.remote) / HEALTH
            for path in there.glob("process_*.json") if there.exists() else []:
                content, here = storage.read_whole(path), self.folder / HEALTH / path.name
                if _time(content) > (_time(here.read_bytes()) if here.exists() else 0.0):
                    self._write(f"{HEALTH}/{path.name}", content)
                    self._in_store[f"{HEALTH}/{path.name}"] = self._stamp(f"{HEALTH}/{path.name}")

    def push(self) -> None:
        """Copy the small files that have changed since the last push to the store."""
        if self.remote is None:
            return
        self._ask_guards()
        with storage.explained(self.remote):
            for name in self._small_files(NOT_PUSHED):
                try:
                    stamp = self._stamp(name)  # before reading: what is written meanwhile goes with the next push
                    if self._in_store.get(name) != stamp:
                        (storage.folder(self.remote) / name).write_bytes((self.folder / name).read_bytes())
                        self._in_store[name] = stamp
                except FileNotFoundError:  # removed or replaced since it was listed
                    continue

    def publish(self, name: str, content: bytes) -> None:
        """Write one small file, here and in the store, now."""
        self._write(name, content)
        if self.remote is not None:
            self._ask_guards()
            with storage.explained(f"{self.remote}/{name}"):
                (storage.folder(self.remote) / name).write_bytes(content)
            self._in_store[name] = self._stamp(name)

    def _ask_guards(self) -> None:
        """Whether this process may still write there: an error if not (`lease.py`)."""
        for guard in self.guards:
            guard()

    def _write(self, name: str, content: bytes) -> None:
        storage.replace_file(storage.inside(self.folder, name), content)

    def _stamp(self, name: str) -> tuple[int, int]:
        stat = (self.folder / name).stat()
        return stat.st_mtime_ns, stat.st_size

    def is_locked(self) -> bool:
        """By a process on this host that trains it."""
        try:
            with open(self.folder / LOCK) as file:  # to read: NFS gives a shared lock to readers only
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (FileNotFoundError, NotADirectoryError):
            return False
        return False

    def small_files(self) -> list[str]:
        """What a run reads when it resumes, besides its checkpoints: names below the folder."""
        return self._small_files(NOT_PULLED)

    def _small_files(self, without: tuple[str, ...]) -> list[str]:
        names = []
        for top, folders, files in os.walk(self.folder):
            relative = Path(top).relative_to(self.folder)
            folders[:] = [name for name in folders if relative.parts or name not in without]
            names += [str(relative / name) for name in files]
        return sorted(name for name in names if _is_small_file(name, without))


def _is_small_file(name: str, without: tuple[str, ...]) -> bool:
    """Whether host and store share it: not the lock, which is this host's own, and not what is half written."""
    return name.split("/")[0] not in without and not name.endswith((LOCK, ".partial", ".tmp"))


def _time(heartbeat: bytes) -> float:
    try:
        return float(json.loads(heartbeat)["time"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def open_run(target: str | Path) -> Run:
    """A run by its folder, or by its URL with a working folder in this user's cache."""
    if not storage.is_remote(target):
        if Path(target).is_file():
            raise UserError(f"{target} is a file, and a run is a folder")
        return Run(Path(target))
    url = storage.url_of(target)
    folder = storage.cache_folder("runs", url)
    folder.mkdir(parents=True, exist_ok=True)
    return Run(folder, url)


def read_config(run: Run) -> "ExperimentConfig":
    """The config of a run, as it was resolved."""
    from tinypod.experiment import ExperimentConfig

    if not (run.folder / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: it has no {CONFIG}")
    return configs.load(run.folder / CONFIG, [], ExperimentConfig)


def load_config(config: str | Path, overrides: Sequence[str]) -> "ExperimentConfig":
    """The config of a file, of a recipe, or of a run (its folder or its URL)."""
    from tinypod.experiment import ExperimentConfig

    path = Path(config)
    if storage.is_remote(config):
        stored = open_run(config)
        stored.pull()
        path = stored.folder
    of_a_run = path / CONFIG
    return configs.load(of_a_run if of_a_run.is_file() else path, overrides, ExperimentConfig)


def run_to_train(config: str | Path, run: str | Path | None) -> Run:
    """The one named, the one that the config is of, or one named like the config."""
    path = Path(config)
    if run is not None or storage.is_remote(config):
        return open_run(run or config)
    if (path / CONFIG).is_file():  # else a folder is no run: `demo` is the recipe, also beside a folder of that name
        return open_run(path)
    of_a_run = path.name == CONFIG and (path.parent / CHECKPOINTS).is_dir()
    return open_run(path.parent if of_a_run else Path("runs") / path.stem)


@contextmanager
def lock(run: Run) -> Iterator[None]:
    """Two processes that train in one folder would ruin it. The kernel drops the lock with the process.

    A run in an object store is locked on this host only; other hosts are told apart by its lease (`lease.py`).
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / LOCK, "a+") as file:
        for look in range(_LOOKS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # perhaps somebody only looks whether it is locked
                time.sleep(0.05 if look < _LOOKS - 1 else 0)
        else:
            file.seek(0)
            raise LockedError(
                f"{run}: another process is training here (pid {file.read().strip() or 'unknown'}); "
                "wait for it, stop it, or choose another --run"
            )
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def with_absolute_paths(config: "ExperimentConfig") -> "ExperimentConfig":
    """A run can be used from any folder."""
    return config.model_copy(update={"data": _absolute(config.data), "task": _absolute(config.task)})


def _absolute(section: Any) -> Any:
    """The same section of a config with every `path` in it absolute."""
    changes: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Config):
            changes[name] = _absolute(value)
        elif name == "path" and not storage.is_remote(value):
            changes[name] = str(Path(value).absolute())
    return section.model_copy(update=changes)
