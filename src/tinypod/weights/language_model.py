"""A language model by where it lies: a Hugging Face folder, a packed one, or a run of ours, on the devices at hand."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from tinypod import sharding
from tinypod.errors import UserError
from tinypod.models import qwen3
from tinypod.runs import storage
from tinypod.runs.folder import CONFIG, open_run
from tinypod.runs.load import load_weights
from tinypod.tasks.task import select
from tinypod.weights import hugging_face, packed


class LanguageModel(NamedTuple):
    name: str
    config: qwen3.Qwen3Config
    params: Any
    mesh: Any
    data: Any = None  # a run's section of the config


def load(
    source: str, *overrides: str, checkpoint: str = "best", mesh: sharding.MeshConfig | None = None
) -> LanguageModel:
    """`overrides` are keys of `model`, like dtype=float32; `mesh` in place of a run's own."""
    path = Path(source)
    more = dict(override.split("=", 1) for override in overrides)
    for file, read in ((packed.ABOUT, _from_packed), (hugging_face.CONFIG, _from_folder)):
        if (path / file).exists():
            return read(path, more, mesh or sharding.MeshConfig())
    if not storage.is_remote(source) and not (path / CONFIG).exists():
        raise UserError(
            f"{source}: expected a language model, in a run (it has no {CONFIG}), in a Hugging Face folder (no "
            f"{hugging_face.CONFIG}) or in a packed one (no {packed.ABOUT})"
        )
    changes = [f"model.{override}" for override in overrides]
    changes += [] if mesh is None else [f"mesh={mesh.model_dump_json()}"]
    loaded = load_weights(open_run(source), changes, checkpoint, needs_data=False)
    experiment = loaded.experiment
    if not isinstance(experiment.config.model, qwen3.Qwen3Config):
        raise UserError(f"{source} is a run of {experiment.config.model.kind!r}, not of a language model")
    name = f"{source}, step {loaded.step}, {loaded.weights}"
    config = experiment.config
    return LanguageModel(name, config.model, loaded.params, experiment.mesh, config.data)


def _from_folder(folder: Path, more: dict[str, Any], layout: sharding.MeshConfig) -> LanguageModel:
    config = hugging_face.read_model_config(folder, **more)
    mesh = sharding.make_mesh(layout)
    shapes = jax.eval_shape(lambda: qwen3.init(config, jax.random.key(0)))
    specs = sharding.param_specs(qwen3.sharding_rules(config), shapes, mesh)
    params = hugging_face.read_params(folder, config, shapes, sharding.named(mesh, specs))
    return LanguageModel(str(folder), config, params, mesh)


def _from_packed(folder: Path, more: dict[str, Any], layout: sharding.MeshConfig) -> LanguageModel:
    config, params = packed.read(folder, **more)
    mesh = sharding.make_mesh(layout)
    specs = sharding.param_specs(qwen3.sharding_rules(config), params, mesh)
    return LanguageModel(str(folder), config, sharding.put(params, sharding.named(mesh, specs)), mesh)


def place(model: LanguageModel) -> sharding.Placement:
    """For its weights as `qwen3.prepare` makes them."""
    shapes = jax.eval_shape(lambda: qwen3.prepare(model.config, qwen3.init(model.config, jax.random.key(0))))
    specs = sharding.param_specs(qwen3.sharding_rules(model.config, prepared=True), shapes, model.mesh)
    return sharding.place(model.mesh, specs)


def without_adapters(model: LanguageModel) -> LanguageModel:
    """The same weights with the adapters left out, not merged: what the model was before they were trained."""
    if model.config.lora is None:
        return model

    def is_base(path: str) -> bool:
        return ".lora_" not in path

    return model._replace(
        name=f"{model.name}, without adapters",
        config=model.config.model_copy(update={"lora": None}),
        params=select(model.params, is_base),
    )
