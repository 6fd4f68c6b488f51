"""The persistent compilation cache: a restart loads what an earlier start compiled. On a GPU it also brings back the
same choice of kernels, without which two compilations of one program may round differently.

JAX never replaces an entry. One that a kill or a full disk cut off would be read, warned of and compiled anew at every
start; one without its time of access would stop all writing. Both are put right here, in a local folder.
"""

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache

from tinypod.runs import storage

logger = logging.getLogger(__name__)

MAX_BYTES = 8 * 2**30
_ENTRY, _ACCESSED = "-cache", "-atime"  # how JAX ends the names of an entry's two files
_read = compilation_cache.get_executable_and_time


def enable(setting: str | None) -> None:
    """`auto`: in the user's cache folder; a path or gs:// URL: there; None: off. JAX's own variable wins."""
    if setting is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    compilation_cache.get_executable_and_time = _read_or_remove
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = str(default_folder() if setting == "auto" else setting)
    jax.config.update("jax_compilation_cache_dir", folder)
    if "://" not in folder:
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
        with contextlib.suppress(OSError):
            _date_entries(Path(folder))


def default_folder() -> Path:
    return storage.cache_root() / "compiled"


def _date_entries(folder: Path) -> None:
    """To keep to a size, JAX asks for the time of access of every entry before it writes one."""
    for entry in folder.glob(f"*{_ENTRY}"):
        accessed = entry.with_name(entry.name.removesuffix(_ENTRY) + _ACCESSED)
        if not accessed.exists():
            accessed.write_bytes(time.time_ns().to_bytes(8, "little"))


def _read_or_remove(cache_key: str, *about: Any, **more: Any) -> tuple[Any, int | None]:
    """JAX's own, but what cannot be read is removed, so that it is compiled and written again."""
    try:
        return _read(cache_key, *about, **more)
    except OSError:  # a disk or a lock that refuses now; the entry may be sound
        raise
    except Exception as error:
        folder = str(jax.config.values["jax_compilation_cache_dir"])
        if "://" in folder:
            raise
        entry = Path(folder) / f"{cache_key}{_ENTRY}"
        entry.unlink(missing_ok=True)
        logger.warning("%s was damaged (%s): removed, and compiled again", entry, error)
        return None, None
