"""A run folder made from weights."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tinypod.errors import ConfigError, DataError, UserError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.models.qwen3 import Qwen3Config
from tinypod.runs import storage
from tinypod.runs.config_history import write_config
from tinypod.runs.folder import CONFIG, IMPORTED, Run, lock, with_absolute_paths
from tinypod.runs.saver import about, open_checkpoints
from tinypod.runs.storage import replace_file
from tinypod.step import select_trained
from tinypod.weights import authors, fidelity, language_model
from tinypod.weights.convert import convert
from tinypod.weights.fidelity import Quantised
from tinypod.weights.language_model import LanguageModel
from tinypod.weights.rounding import Rounding


def create_run(
    run: Run, config: ExperimentConfig, source: str, rounding: Rounding | None = None, *, measure: bool = False
) -> Quantised | None:
    """A new run at step 0 whose weights, live and averaged, are those given; returns what was quantised, if anything
    was, and with `measure` what that does on held-out text."""
    run.pull()
    if (run.folder / CONFIG).exists() or storage.folder(run.checkpoints).exists():
        raise UserError(f"{run} already holds a run; choose another folder")
    config = with_absolute_paths(config)
    experiment = build(config)
    params, quantised = _read(experiment, source, rounding, measure)
    state = experiment.init()
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
    return quantised


def _read(
    experiment: Experiment, source: str, rounding: Rounding | None, measure: bool
) -> tuple[Any, Quantised | None]:
    config, shardings = experiment.config, experiment.state_shardings.params
    if not isinstance(config.model, Qwen3Config):
        if rounding is not None:
            raise ConfigError(f"--round {rounding.kind} is for language models, not for model.kind={config.model.kind}")
        read = authors.from_state_dict(authors.read_state_dict(Path(source)), experiment.abstract_state.params)
        return jax.device_put(read, shardings), None
    found = language_model.load(source, f"dtype={config.model.dtype}", mesh=config.mesh)
    converted = convert(found.config, found.params, config.model, config.seed, rounding)
    params = jax.device_put(converted.params, shardings)
    if not converted.errors:
        return params, None
    quantised = Quantised(config.model, rounding, converted.errors)
    if not measure:
        return params, quantised
    made = LanguageModel(source, config.model, params, experiment.mesh, experiment.specs)
    try:
        return params, quantised._replace(fidelity=fidelity.measure(found, made, fidelity.held_out_blocks(config)))
    except DataError as error:
        return params, quantised._replace(without=str(error))
