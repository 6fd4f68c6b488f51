"""The persistent compilation cache: a restart loads what an earlier start compiled. On a GPU it also brings back the
same choice of kernels, without which two compilations of one program may round differently."""

import os
from pathlib import Path

import jax

from tinypod.runs import storage

MAX_BYTES = 8 * 2**30


def enable(setting: str | None) -> None:
    """`auto`: in the user's cache folder; a path or gs:// URL: there; None: off. JAX's own variable wins."""
    if setting is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = str(Path(default_folder()) if setting == "auto" else setting)
    jax.config.update("jax_compilation_cache_dir", folder)
    if "://" not in folder:
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)


def default_folder() -> Path:
    return storage.cache_root() / "compiled"
