"""Analyses kept in the user's cache folder, under a hash of everything that the compiled step depends on."""

import hashlib
import json
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh
from pydantic import ValidationError

from tinypod.experiment import ExperimentConfig
from tinypod.planning import compiler as tpu_compiler
from tinypod.planning.analysis import Analysis
from tinypod.planning.hardware import Hardware
from tinypod.runs import storage
from tinypod.sharding import AXES
from tinypod.tasks.task import Task

# Of JAX's settings in the environment, those that cannot change a program.
_HARMLESS = tuple(
    f"JAX_{name}" for name in ("PLATFORMS", "COMPILATION_CACHE", "PERSISTENT_CACHE", "LOGGING", "DEBUG", "TRACEBACK")
)
# Of the config, what the compiled step does not depend on.
_IRRELEVANT = {"seed", "steps", "eval", "checkpoint", "log", "health", "nonfinite", "compile_cache"}


def folder() -> Path:
    return storage.cache_root() / "plans"


def read(key: str) -> Analysis | None:
    """None where it is not there, is of another version, or is not what was written."""
    try:
        digest, _, kept = (folder() / f"{key}.json").read_bytes().partition(b"\n")
        return Analysis.model_validate_json(kept) if digest == _digest(key, kept) else None
    except (OSError, ValidationError):
        return None


def write(key: str, analysis: Analysis) -> None:
    folder().mkdir(parents=True, exist_ok=True)
    kept = analysis.model_dump_json().encode()
    storage.replace_file(folder() / f"{key}.json", _digest(key, kept) + b"\n" + kept)


def _digest(key: str, kept: bytes) -> bytes:
    return hashlib.sha256(key.encode() + kept).hexdigest().encode()


def cache_key(config: ExperimentConfig, task: Task, target: Hardware) -> str:
    """Other rates, another seed or more steps ask for no new compilation."""
    tree = {name: value for name, value in config.model_dump(mode="json").items() if name not in _IRRELEVANT}
    tree["optimizer"], tree["task"] = _without_numbers(tree["optimizer"]), _without_numbers(tree["task"])
    tree["ema_decay"] = tree["ema_decay"] is not None
    tree["data"] = {name: value for name, value in tree["data"].items() if name not in ("path", "expected")}
    tree["mesh"] = config.mesh.shape(target.devices)
    parts = (tree, _shapes(task), target.topology_arguments(), _versions(target))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _without_numbers(tree: Any) -> Any:
    """Rates, decays and the warm-up are arguments of the program; other numbers cost the same whatever they are."""
    if isinstance(tree, dict):
        return {name: _without_numbers(value) for name, value in tree.items() if name != "warmup_steps"}
    return "a number" if isinstance(tree, float) else tree


def _shapes(task: Task) -> list[str]:
    """Of weights and data, which depend on the data."""
    params = jax.eval_shape(lambda: task.init_params(jax.random.key(0)))
    feed = task.abstract_feed(AbstractMesh((1,) * len(AXES), AXES))
    leaves = jax.tree_util.tree_leaves_with_path((params, feed))
    return [f"{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)}" for path, x in leaves]


def _versions(target: Hardware) -> dict[str, str]:
    settings = {
        name: value
        for name, value in os.environ.items()
        if name == "LIBTPU_INIT_ARGS" or (name.startswith("JAX_") and not name.startswith(_HARMLESS))
    }
    packages = {name: version(name) for name in ("jax", "jaxlib", "optax")}
    return packages | settings | {"source": _source_hash(), "compiler": tpu_compiler.compiler_version(target)}


@cache
def _source_hash() -> str:
    """Of the whole package: what is compiled, and how it is read, may depend on any of it."""
    package, source = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return source.hexdigest()
