"""A run is a folder: `config.yaml`, `metrics.jsonl`, `checkpoints/`, `curves.png`, and mirrors of the metrics.

A run in an object store (`gs://bucket/runs/x`) writes its checkpoints there directly. Its small files are in a working
folder on this host, copied from the store at the start (`pull`) and to it before each checkpoint (`push`): whatever a
checkpoint holds is in the store's `metrics.jsonl` before the checkpoint is visible.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tinypod import config as configs
from tinypod import sharding
from tinypod.errors import CheckpointError, ConfigError, UserError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.health import watch as health
from tinypod.runs import storage
from tinypod.runs.checkpoints import SET_ASIDE, Checkpoints
from tinypod.step import TrainState
from tinypod.weights import authors as torch_weights

CONFIG, CHECKPOINTS, LOCK = "config.yaml", "checkpoints", ".lock"
NOT_PUSHED = (CHECKPOINTS, SET_ASIDE, "wandb")  # W&B keeps its own copy, and many files
NOT_PULLED = (*NOT_PUSHED, "tensorboard", "profile", "logs")  # what a run writes and does not read


@dataclass(frozen=True)
class Run:
    """Where a run is."""

    folder: Path  # the small files
    remote: str | None = None  # "gs://bucket/runs/x" when the run lives in an object store
    _in_store: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

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
        if self.remote is None or (not locked and self._is_locked()):
            return
        with storage.explained(self.remote):
            there = storage.folder(self.remote)
            names = [name for name in storage.files_under(there) if name.split("/")[0] not in NOT_PULLED]
            for name in set(self._small_files(NOT_PULLED)) - set(names):
                (self.folder / name).unlink(missing_ok=True)
            for name in names:
                self._write(name, (there / name).read_bytes())
                self._in_store[name] = self._stamp(name)

    def pull_heartbeats(self) -> None:
        """Those of other hosts, where they are newer than what is here; also while the run is being trained."""
        if self.remote is None:
            return
        with storage.explained(self.remote):
            there = storage.folder(self.remote) / health.FOLDER
            for path in there.glob("process_*.json") if there.exists() else []:
                content, here = path.read_bytes(), self.folder / health.FOLDER / path.name
                if _time(content) > (_time(here.read_bytes()) if here.exists() else 0.0):
                    self._write(f"{health.FOLDER}/{path.name}", content)

    def push(self) -> None:
        """Copy the small files that have changed since the last push to the store."""
        if self.remote is None:
            return
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
            with storage.explained(f"{self.remote}/{name}"):
                (storage.folder(self.remote) / name).write_bytes(content)
            self._in_store[name] = self._stamp(name)

    def _write(self, name: str, content: bytes) -> None:
        storage.replace_file(storage.inside(self.folder, name), content)

    def _stamp(self, name: str) -> tuple[int, int]:
        stat = (self.folder / name).stat()
        return stat.st_mtime_ns, stat.st_size

    def _is_locked(self) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / LOCK, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def _small_files(self, without: tuple[str, ...]) -> list[str]:
        names = []
        for top, folders, files in os.walk(self.folder):
            relative = Path(top).relative_to(self.folder)
            if relative == Path("."):
                folders[:] = [name for name in folders if name not in without]
            names += [str(relative / name) for name in files if not name.endswith((LOCK, ".partial", ".tmp"))]
        return sorted(names)


def _time(heartbeat: bytes) -> float:
    try:
        return float(json.loads(heartbeat)["time"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def open_run(target: str | Path) -> Run:
    """A run by its folder, or by its URL with a working folder in this user's cache."""
    if not storage.is_remote(target):
        return Run(Path(target))
    url = storage.url_of(target)
    folder = storage.cache_folder("runs", url)
    folder.mkdir(parents=True, exist_ok=True)
    return Run(folder, url)


def read_config(run: Run) -> ExperimentConfig:
    """The config of a run, as it was resolved."""
    if not (run.folder / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: it has no {CONFIG}")
    return configs.load(run.folder / CONFIG, [], ExperimentConfig)


def write_config(run: Run, config: ExperimentConfig) -> list[str]:
    """Store the resolved config; returns what it changes in the one that was there."""
    path, text = run.folder / CONFIG, configs.dump(config)
    try:
        old = read_config(run).model_dump(mode="json") if path.exists() else None
    except ConfigError:  # written by a version with another schema; the checkpoint decides whether it fits
        old = {}
    changed = configs.differences(old, config.model_dump(mode="json")) if old is not None else []
    if changed or not path.exists():
        storage.replace_file(path, text.encode())
    return changed


@contextmanager
def lock(run: Run) -> Iterator[None]:
    """Two processes that train in one folder would ruin it. The kernel drops the lock with the process.

    A run in an object store is locked on this host only.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(
                f"{run}: another process is training here (pid {file.read().strip() or 'unknown'}); "
                "wait for it, stop it, or choose another --run"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def open_checkpoints(run: Run, config: ExperimentConfig, read_only: bool = False) -> Checkpoints:
    best = config.checkpoint.best
    return Checkpoints(
        run.checkpoints,
        keep_last=config.checkpoint.keep_last,
        best_metric=best.metric if best else None,
        best_mode=best.mode if best else "max",
        keep_every_hours=config.checkpoint.keep_every_hours,
        read_only=read_only,
        timeout_s=math.ceil(config.health.save_timeout_s),
    )


def load_state(run: Run, overrides: list[str], checkpoint: str) -> tuple[Experiment, TrainState]:
    """A run's experiment and state: `latest`, `best` or a step."""
    run.pull()
    config = read_config(run)
    if overrides:
        config = configs.load(run.folder / CONFIG, overrides, ExperimentConfig)
    with storage.explained(run.checkpoints):
        there = storage.folder(run.checkpoints).is_dir()
    if not there:
        raise CheckpointError(f"{run}: no checkpoint yet; train it first")
    checkpoints = open_checkpoints(run, config, read_only=True)
    step = pick_step(checkpoints, checkpoint, run)
    experiment = build(_on_these_devices(config))
    whole = sharding.replicated(experiment.mesh)  # the training batch may not divide over these devices
    carry = experiment.abstract_state.carry
    carry = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), carry)
    return experiment, checkpoints.restore(step, experiment.abstract_state._replace(carry=carry))


def _on_these_devices(config: ExperimentConfig) -> ExperimentConfig:
    """A run trained on a pod can be looked at on a laptop: a mesh that does not fit gives way to a plain one."""
    try:
        config.mesh.shape(jax.device_count())
        return config
    except ConfigError:
        return config.model_copy(update={"mesh": sharding.MeshConfig()})


def with_absolute_paths(config: ExperimentConfig) -> ExperimentConfig:
    """A run can be used from any folder."""
    if storage.is_remote(config.data.path):
        return config
    path = str(Path(config.data.path).absolute())
    return config.model_copy(update={"data": config.data.model_copy(update={"path": path})})


def about(experiment: Experiment) -> dict[str, Any]:
    """What a checkpoint says about where it comes from."""
    hashes = {name: split.sha256 for name, split in experiment.info.splits.items()}
    return {"config": experiment.config.model_dump(mode="json"), "dataset": hashes}


def pick_step(checkpoints: Checkpoints, wanted: str, run: Run) -> int:
    if wanted.isdigit():
        return int(wanted)
    latest, best = checkpoints.latest(), checkpoints.best()
    if latest is None:
        raise CheckpointError(f"{run}: no checkpoint yet; train it first")
    if wanted == "latest":
        return latest
    if wanted == "best":
        return best[0] if best is not None else latest
    raise UserError(f"--checkpoint {wanted}: expected `best`, `latest` or a step, one of {checkpoints.steps()}")


def create_from_params(run: Run, config: ExperimentConfig, state_dict: torch_weights.StateDict) -> None:
    """A new run at step 0 whose weights, live and averaged, are the ones given."""
    run.pull()
    if (run.folder / CONFIG).exists() or storage.folder(run.checkpoints).exists():
        raise UserError(f"{run} already holds a run; choose another folder")
    config = with_absolute_paths(config)
    experiment = build(config)
    params = torch_weights.from_state_dict(state_dict, experiment.abstract_state.params)
    state = experiment.init()
    params = jax.device_put(params, experiment.state_shardings.params)
    ema = {name: jax.tree.map(jnp.copy, params[name]) for name in state.ema}
    state = state._replace(params=params, ema=ema, carry=experiment.task.init_carry(params))
    with lock(run):
        write_config(run, config)
        run.push()
        checkpoints = open_checkpoints(run, config)
        checkpoints.save(state, about(experiment))
        checkpoints.wait()
        checkpoints.close()
