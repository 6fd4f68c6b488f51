"""A run folder made from weights."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tinypod.errors import UserError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.models.qwen3 import Qwen3Config
from tinypod.runs import storage
from tinypod.runs.config_history import write_config
from tinypod.runs.folder import CONFIG, IMPORTED, Run, lock, with_absolute_paths
from tinypod.runs.saver import about, open_checkpoints
from tinypod.runs.storage import replace_file
from tinypod.step import select_trained
from tinypod.weights import authors, language_model
from tinypod.weights.convert import convert


def create_run(run: Run, config: ExperimentConfig, source: str) -> dict[str, float]:
    """A new run at step 0 whose weights, live and averaged, are those given; returns errors of what was quantised."""
    run.pull()
    if (run.folder / CONFIG).exists() or storage.folder(run.checkpoints).exists():
        raise UserError(f"{run} already holds a run; choose another folder")
    config = with_absolute_paths(config)
    experiment = build(config)
    params, errors = _read(experiment, source)
    state = experiment.init()
    params = jax.device_put(params, experiment.state_shardings.params)
    ema = jax.tree.map(jnp.copy, select_trained(experiment.task, params)) if state.ema else {}
    state = state._replace(params=params, ema=ema, carry=experiment.task.init_carry(params))
    with lock(run):
        write_config(run, config, 0, [])
        replace_file(run.folder / IMPORTED, json.dumps({"from": str(Path(source).absolute())}).encode(), durable=True)
        run.push()
        checkpoints = open_checkpoints(run, experiment, {})
        checkpoints.save(state, about(experiment))
        checkpoints.wait()
        checkpoints.close()
    return errors


def _read(experiment: Experiment, source: str) -> tuple[Any, dict[str, float]]:
    model = experiment.config.model
    if isinstance(model, Qwen3Config):
        found = language_model.load(source)
        return convert(found.config, found.params, model, experiment.config.seed)
    return authors.from_state_dict(authors.read_state_dict(Path(source)), experiment.abstract_state.params), {}
