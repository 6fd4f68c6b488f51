"""A run is a folder: `config.yaml`, `metrics.jsonl`, `checkpoints/`, `curves.png`, and mirrors of the metrics."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tinypod import config as configs
from tinypod import sharding
from tinypod.checkpoint import Checkpoints
from tinypod.errors import CheckpointError, ConfigError, UserError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.models import torch_weights
from tinypod.step import TrainState

CONFIG, CHECKPOINTS, LOCK = "config.yaml", "checkpoints", ".lock"


def read_config(run_dir: Path) -> ExperimentConfig:
    """The config of a run, as it was resolved."""
    if not (run_dir / CONFIG).is_file():
        raise UserError(f"{run_dir} is not a run folder: it has no {CONFIG}")
    return configs.load(run_dir / CONFIG, [], ExperimentConfig)


def write_config(run_dir: Path, config: ExperimentConfig) -> list[str]:
    """Store the resolved config; returns what it changes in the one that was there."""
    path, text = run_dir / CONFIG, configs.dump(config)
    try:
        old = read_config(run_dir).model_dump(mode="json") if path.exists() else None
    except ConfigError:  # written by a version with another schema; the checkpoint decides whether it fits
        old = {}
    changed = configs.differences(old, config.model_dump(mode="json")) if old is not None else []
    if changed or not path.exists():
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        os.replace(partial, path)
    return changed


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Two processes that train in one folder would ruin it. The kernel drops the lock with the process."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(
                f"{run_dir}: another process is training here (pid {file.read().strip() or 'unknown'}); "
                "wait for it, stop it, or choose another --run"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def open_checkpoints(run_dir: Path, config: ExperimentConfig, read_only: bool = False) -> Checkpoints:
    best = config.checkpoint.best
    return Checkpoints(
        run_dir / CHECKPOINTS,
        keep_last=config.checkpoint.keep_last,
        best_metric=best.metric if best else None,
        best_mode=best.mode if best else "max",
        read_only=read_only,
    )


def load_state(run_dir: Path, overrides: list[str], checkpoint: str) -> tuple[Experiment, TrainState]:
    """A run's experiment and state: `latest`, `best` or a step."""
    config = read_config(run_dir)
    if overrides:
        config = configs.load(run_dir / CONFIG, overrides, ExperimentConfig)
    if not (run_dir / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{run_dir}: no checkpoint yet; train it first")
    checkpoints = open_checkpoints(run_dir, config, read_only=True)
    step = pick_step(checkpoints, checkpoint, run_dir)
    experiment = build(config)
    whole = sharding.replicated(experiment.mesh)  # also where the training batch does not divide over these devices
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), experiment.abstract_state)
    return experiment, checkpoints.restore(step, abstract)


def with_absolute_paths(config: ExperimentConfig) -> ExperimentConfig:
    """A run can be used from any folder."""
    path = str(Path(config.data.path).absolute())
    return config.model_copy(update={"data": config.data.model_copy(update={"path": path})})


def about(experiment: Experiment) -> dict[str, Any]:
    """What a checkpoint says about where it comes from."""
    hashes = {name: split.sha256 for name, split in experiment.info.splits.items()}
    return {"config": experiment.config.model_dump(mode="json"), "dataset": hashes}


def pick_step(checkpoints: Checkpoints, wanted: str, run_dir: Path) -> int:
    if wanted.isdigit():
        return int(wanted)
    latest, best = checkpoints.latest(), checkpoints.best()
    if latest is None:
        raise CheckpointError(f"{run_dir}: no checkpoint yet; train it first")
    if wanted == "latest":
        return latest
    if wanted == "best":
        return best[0] if best is not None else latest
    raise UserError(f"--checkpoint {wanted}: expected `best`, `latest` or a step, one of {checkpoints.steps()}")


def create_from_params(run_dir: Path, config: ExperimentConfig, state_dict: torch_weights.StateDict) -> None:
    """A new run at step 0 whose weights, live and averaged, are the ones given."""
    if (run_dir / CONFIG).exists() or (run_dir / CHECKPOINTS).exists():
        raise UserError(f"{run_dir} already holds a run; choose another folder")
    config = with_absolute_paths(config)
    experiment = build(config)
    params = torch_weights.from_state_dict(state_dict, experiment.abstract_state.params)
    state = experiment.init()
    params = jax.device_put(params, experiment.state_shardings.params)
    ema = {name: jax.tree.map(jnp.copy, params[name]) for name in state.ema}
    state = state._replace(params=params, ema=ema, carry=experiment.task.init_carry(params))
    with lock(run_dir):
        write_config(run_dir, config)
        checkpoints = open_checkpoints(run_dir, config)
        checkpoints.save(state, about(experiment))
        checkpoints.wait()
        checkpoints.close()
