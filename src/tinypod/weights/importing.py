"""A run folder made from weights."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tinypod.errors import ConfigError, UserError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.models.qwen3 import Qwen3Config
from tinypod.runs import storage
from tinypod.runs.config_history import write_config
from tinypod.runs.folder import CONFIG, IMPORTED, Run, lock, with_absolute_paths
from tinypod.runs.saver import about, open_checkpoints
from tinypod.runs.storage import replace_file
from tinypod.step import select_trained
from tinypod.weights import authors, language_model, peft
from tinypod.weights.convert import convert, snap_magnitudes, with_adapters


class Imported(NamedTuple):
    params: Any
    errors: dict[str, float]  # by linear layer, relative, of what was quantised
    snapped: float | None = None  # the largest relative change of a magnitude


def create_run(
    run: Run, config: ExperimentConfig, source: str, adapter: Path | None = None, snap: bool = False
) -> Imported:
    """A new run at step 0 whose weights, live and averaged, are those given, with the adapters of a PEFT folder.

    With `snap` the magnitudes g of low-bit weights are rounded to what float16 holds.
    """
    run.pull()
    if (run.folder / CONFIG).exists() or storage.folder(run.checkpoints).exists():
        raise UserError(f"{run} already holds a run; choose another folder")
    config = with_absolute_paths(config)
    experiment = build(config)
    imported = _read(experiment, source, adapter, snap)
    state = experiment.init()
    params = jax.device_put(imported.params, experiment.state_shardings.params)
    ema = jax.tree.map(jnp.copy, select_trained(experiment.task, params)) if state.ema else {}
    state = state._replace(params=params, ema=ema, carry=experiment.task.init_carry(params))
    with lock(run):
        write_config(run, config, 0, [])
        origin = {"from": str(Path(source).absolute())}
        replace_file(run.folder / IMPORTED, json.dumps(origin).encode(), durable=True)
        run.push()
        checkpoints = open_checkpoints(run, experiment, {})
        checkpoints.save(state, about(experiment))
        checkpoints.wait()
        checkpoints.close()
    return imported


def read_origin(run: Run) -> str:
    """Where the weights came from that a run began with; empty if they were its own."""
    path = run.folder / IMPORTED
    return str(json.loads(path.read_text())["from"]) if path.exists() else ""


def _read(experiment: Experiment, source: str, adapter: Path | None, snap: bool) -> Imported:
    model = experiment.config.model
    if not isinstance(model, Qwen3Config):
        if adapter is not None or snap:
            raise ConfigError(f"--adapter and --snap are for language models; model.kind is {model.kind!r}")
        theirs = authors.read_state_dict(Path(source))
        return Imported(authors.from_state_dict(theirs, experiment.abstract_state.params), {})
    if snap and model.low_bit is None:
        raise ConfigError("--snap rounds the magnitudes of low-bit weights: set model.low_bit, or leave it out")
    adapters = None if adapter is None else peft.read_adapter(adapter, model)
    found = language_model.load(source)
    if adapters is not None and found.config.lora is not None:
        raise UserError(
            f"{source} has adapters of its own; merge them first: "
            f"`tinypod weights import {source} CONFIG RUN model.lora=null`, and give that run"
        )
    params, errors = convert(found.config, found.params, model, experiment.config.seed)
    if adapters is not None:
        params = with_adapters(params, adapters)
    if snap:
        params, largest = snap_magnitudes(params)
        return Imported(params, errors, largest)
    return Imported(params, errors)
