"""The weights of a run or of a release, for commands that use a trained model. The rest of the state is not read: the
training batch and its dtype play no role, and any mesh will do."""

import re
from typing import Any, NamedTuple

import jax

from tinypod import config as configs
from tinypod import sharding
from tinypod.errors import CheckpointError, ConfigError, DataError, UserError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.runs.checkpoints import Checkpoints
from tinypod.runs.checksums import flatten
from tinypod.runs.description import read_description
from tinypod.runs.failures import VanishedError
from tinypod.runs.folder import CONFIG, Run, read_config
from tinypod.runs.release import Release, Source, read_tensors
from tinypod.runs.run_log import read_scores
from tinypod.runs.saver import open_checkpoints
from tinypod.step import evaluation_params, select_trained
from tinypod.tasks.task import is_trained, select

TRIES = 5  # a run that trains may remove a checkpoint while it is read
# Config keys that a trained model may be used with: where and how it computes, what on, how long it thinks.
USABLE = r"(mesh|data)(\..*)?|eval\.(batch_size|weights)|model\.(dtype|unroll|fused|[HL]_cycles)"
USABLE += r"|task\.(halting\.max_steps|thinking(\..*)?)"


class Loaded(NamedTuple):
    experiment: Experiment
    params: Any
    step: int
    weights: str  # ema or live


def load_weights(
    source: Source, overrides: list[str], checkpoint: str, weights: str | None = None, *, needs_data: bool = True
) -> Loaded:
    """Of the checkpoint `best`, `latest` or a step; a release has one. `best` is by the score of the same kind of
    weights; where there is none, it is the latest. Without `needs_data`, what the run remembers of its data is
    enough."""
    if isinstance(source, Release):
        return _load_release(source, overrides, checkpoint, weights, needs_data=needs_data)
    run = source
    run.pull()
    config = read_config(run)
    if overrides:
        config = configs.load(run.folder / CONFIG, overrides, ExperimentConfig)
    config = _on_these_devices(config, overrides)
    experiment = build(config, dataset=None if needs_data else read_description(run).dataset)
    weights = weights or config.eval.weights
    scores = read_scores(run.folder, experiment) if weights == config.eval.weights else {}
    checkpoints = open_checkpoints(run, experiment, scores, read_only=True)
    for tries_left in reversed(range(TRIES)):
        step = pick_step(checkpoints, checkpoint, run)
        try:
            return Loaded(experiment, _read(checkpoints, experiment, step, weights), step, weights)
        except VanishedError:
            if checkpoint.isdigit() or not tries_left:
                raise
            checkpoints.reload()
    raise AssertionError


def _load_release(
    release: Release, overrides: list[str], checkpoint: str, weights: str | None, *, needs_data: bool
) -> Loaded:
    about, asked = release.about, _asked(overrides)
    weights = weights or asked.get("eval", {}).get("weights")
    if checkpoint not in ("best", "latest", str(about.step)):
        raise UserError(f"--checkpoint {checkpoint}: {release} is a release of step {about.step} alone; leave it out")
    if weights not in (None, about.weights):
        raise UserError(f"--weights {weights}: {release} is a release of {about.weights} weights alone; leave it out")
    if needs_data and not names_data(overrides):
        raise DataError(
            f"{release} is a release, and those come without a dataset; give one of such puzzles: data.path=FOLDER"
        )
    config = _on_these_devices(release.read_config(overrides), overrides)
    if sharding.all_devices()[0].platform == "cpu" and "dtype" not in asked.get("model", {}):
        # Half precision is emulated on CPUs: slower, and no use of the weights asks for it.
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    experiment = build(config, dataset=None if needs_data else about.dataset)
    return Loaded(experiment, _place(release, experiment), about.step, about.weights)


def names_data(overrides: list[str]) -> bool:
    """Whether they say where a dataset is."""
    return "path" in _asked(overrides).get("data", {})


def _place(release: Release, experiment: Experiment) -> Any:
    """A release's tensors as the parameters of an experiment; every name and shape must match."""
    found, wanted = read_tensors(release), flatten(experiment.abstract_params)
    wrong = [f"missing from the file: {name}" for name in wanted if name not in found]
    wrong += [f"in the file, but not in this model: {name}" for name in found if name not in wanted]
    wrong += [
        f"{name}: the file has {found[name].shape}, the config and its dataset {leaf.shape}"
        for name, leaf in wanted.items()
        if name in found and found[name].shape != leaf.shape
    ]
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        raise CheckpointError(
            f"{release.path}: not the weights of this model; give a dataset (data.path) of puzzles like those that it "
            f"was trained on, or export the release again:{lines}"
        )
    values = [found[name].astype(leaf.dtype) for name, leaf in wanted.items()]
    tree = jax.tree.unflatten(jax.tree.structure(experiment.abstract_params), values)
    return sharding.put(tree, experiment.state_shardings.params)


def check_overrides(overrides: list[str]) -> None:
    """Of commands that use a trained model as it is."""
    for text in overrides:
        key = text.partition("=")[0]
        if "=" in text and re.fullmatch(USABLE, key) is None:
            raise ConfigError(
                f"{key}: a trained model is used as it is, and this key belongs to its training. Keys that can be set "
                "here: data.*, mesh.*, model.dtype, model.unroll, model.fused, model.H_cycles, model.L_cycles, "
                "task.halting.max_steps, task.thinking.*, eval.batch_size, eval.weights"
            )


def _read(checkpoints: Checkpoints, experiment: Experiment, step: int, weights: str) -> Any:
    params, task = experiment.abstract_params, experiment.task
    part = {"params": params}
    if weights == "ema":
        ema = select_trained(task, params) if experiment.config.ema_decay is not None else {}
        evaluation_params(params, ema, weights)  # an error where no averages are kept
        part = {"params": select(params, lambda path: not is_trained(task, path)), "ema": ema}
    restored = checkpoints.restore(step, part)
    return evaluation_params(restored["params"], restored.get("ema", {}), weights)


def _on_these_devices(config: ExperimentConfig, overrides: list[str]) -> ExperimentConfig:
    """A run trained on a pod can be looked at on a laptop: a mesh that does not fit gives way to a plain one, with what
    the overrides ask for."""
    devices = sharding.all_devices()
    try:
        sharding.make_mesh(config.mesh, devices)
        return config
    except ConfigError:
        layout = {"slices": sharding.num_slices(devices)} | _asked(overrides).get("mesh", {})
        plain = configs.validate(layout, sharding.MeshConfig, "mesh")
        return config.model_copy(update={"mesh": plain})


def _asked(overrides: list[str]) -> dict[str, Any]:
    """The overrides as a tree."""
    asked: dict[str, Any] = {}
    for text in overrides:
        asked = configs.merge(asked, configs.parse_override(text))
    return asked


def pick_step(checkpoints: Checkpoints, wanted: str, run: Run) -> int:
    if wanted.isdigit():
        return int(wanted)
    latest, best = checkpoints.latest(), checkpoints.best()
    if latest is None:
        raise CheckpointError(f"{run}: no checkpoint yet; train it first")
    if wanted in ("best", "latest"):
        return best[0] if wanted == "best" and best is not None else latest
    raise UserError(f"--checkpoint {wanted}: expected `best`, `latest` or a step, one of {checkpoints.steps()}")
