"""A run folder made from weights."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from tinypod.errors import UserError
from tinypod.experiment import ExperimentConfig, build
from tinypod.runs import storage
from tinypod.runs.config_history import write_config
from tinypod.runs.folder import CONFIG, IMPORTED, Run, lock, with_absolute_paths
from tinypod.runs.saver import about, open_checkpoints
from tinypod.runs.storage import replace_file
from tinypod.step import select_trained
from tinypod.weights import authors


def create_run(run: Run, config: ExperimentConfig, weights_file: Path) -> None:
    """A new run at step 0 whose weights, live and averaged, are those of the TRM authors' file."""
    run.pull()
    if (run.folder / CONFIG).exists() or storage.folder(run.checkpoints).exists():
        raise UserError(f"{run} already holds a run; choose another folder")
    config = with_absolute_paths(config)
    experiment = build(config)
    params = authors.from_state_dict(authors.read_state_dict(weights_file), experiment.abstract_state.params)
    state = experiment.init()
    params = jax.device_put(params, experiment.state_shardings.params)
    ema = jax.tree.map(jnp.copy, select_trained(experiment.task, params)) if state.ema else {}
    state = state._replace(params=params, ema=ema, carry=experiment.task.init_carry(params))
    with lock(run):
        write_config(run, config, 0, [])
        replace_file(run.folder / IMPORTED, json.dumps({"from": str(weights_file.absolute())}).encode(), durable=True)
        run.push()
        checkpoints = open_checkpoints(run, experiment, {})
        checkpoints.save(state, about(experiment))
        checkpoints.wait()
        checkpoints.close()
