"""A run folder made from weights."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tinypod.errors import ConfigError, DataError, UserError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.models.qwen3 import Qwen3Config
from tinypod.runs import storage
from tinypod.runs.config_history import write_config
from tinypod.runs.description import write_description
from tinypod.runs.folder import CONFIG, IMPORTED, Run, lock, with_absolute_paths
from tinypod.runs.saver import about, open_checkpoints
from tinypod.runs.storage import replace_file
from tinypod.step import select_trained
from tinypod.weights import authors, fidelity, language_model, peft
from tinypod.weights.convert import convert, snap_magnitudes, with_adapters
from tinypod.weights.fidelity import Quantised
from tinypod.weights.language_model import LanguageModel
from tinypod.weights.rounding import Rounding


class Options(NamedTuple):
    """What is done to a language model besides giving it the form that the config says."""

    rounding: Rounding | None = None  # of plain weights, in groups
    adapter: Path | None = None  # a PEFT folder
    snap: bool = False  # round the magnitudes g of low-bit weights to what float16 holds
    measure: bool = False  # what quantising does on held-out text


DEFAULT = Options()


class Imported(NamedTuple):
    params: Any
    quantised: Quantised | None = None
    snapped: float | None = None  # the largest relative change of a magnitude


def create_run(run: Run, config: ExperimentConfig, source: str, options: Options = DEFAULT) -> Imported:
    """A new run at step 0 whose weights, live and averaged, are those given."""
    run.pull()
    if (run.folder / CONFIG).exists() or storage.folder(run.checkpoints).exists():
        raise UserError(f"{run} already holds a run; choose another folder")
    config = with_absolute_paths(config)
    experiment = build(config)
    imported = _read(experiment, source, options)
    state, params = experiment.init(), imported.params
    ema = jax.tree.map(jnp.copy, select_trained(experiment.task, params)) if state.ema else {}
    state = state._replace(params=params, ema=ema, carry=experiment.task.init_carry(params))
    with lock(run):
        write_config(run, config, 0, [])
        write_description(run, experiment)
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


def _read(experiment: Experiment, source: str, options: Options) -> Imported:
    config, shardings = experiment.config, experiment.state_shardings.params
    if not isinstance(config.model, Qwen3Config):
        if asked := [f"--{name}" for name, given in options._asdict().items() if given and name != "measure"]:
            what = " and ".join(asked).replace("rounding", "round")
            raise ConfigError(f"{what} is for language models; model.kind is {config.model.kind!r}")
        authors.check_model(config.model)
        theirs = authors.read_state_dict(Path(source))
        return Imported(jax.device_put(authors.from_state_dict(theirs, experiment.abstract_state.params), shardings))
    if options.snap and config.model.low_bit is None:
        raise ConfigError("--snap rounds the magnitudes of low-bit weights: set model.low_bit, or leave it out")
    adapters = None if options.adapter is None else peft.read_adapter(options.adapter, config.model)
    found = language_model.load(source, f"dtype={config.model.dtype}", mesh=config.mesh)
    if adapters is not None and found.config.lora is not None:
        raise UserError(
            f"{source} has adapters of its own; merge them first: "
            f"`tinypod weights import {source} CONFIG RUN model.lora=null`, and give that run"
        )
    params, errors = convert(found.config, found.params, config.model, config.seed, options.rounding)
    if adapters is not None:
        params = with_adapters(params, adapters)
    snapped = None
    if options.snap:
        params, snapped = snap_magnitudes(params)
    params = jax.device_put(params, shardings)
    if not errors:
        return Imported(params, None, snapped)
    quantised = Quantised(config.model, options.rounding, errors)
    if options.measure:
        quantised = _measured(quantised, found, LanguageModel(source, config.model, params, experiment.mesh), config)
    return Imported(params, quantised, snapped)


def _measured(quantised: Quantised, source: LanguageModel, made: LanguageModel, config: ExperimentConfig) -> Quantised:
    try:
        return quantised._replace(fidelity=fidelity.measure(source, made, fidelity.held_out_blocks(config)))
    except DataError as error:
        return quantised._replace(without=str(error))
