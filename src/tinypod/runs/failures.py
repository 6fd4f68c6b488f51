"""What it means that a checkpoint cannot be saved, or cannot be read: of another model, gone, on a disk or store in
trouble, or damaged. It is called damaged only where nothing else can be the reason."""

import errno
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from tinypod.errors import CheckpointError, DamagedError, StorageError
from tinypod.runs import storage
from tinypod.runs.orbax_manager import Leaf
from tinypod.runs.set_aside import MARKER, SET_ASIDE

CHECKSUMS = "checksums"  # the leaf beside the state's own
REFUSED = re.compile(r"PERMISSION_DENIED|RESOURCE_EXHAUSTED|Permission denied|Too many open|Input/output error")
LOOK_AGAIN_S = 1.0


class VanishedError(CheckpointError):
    """A checkpoint that was there when it was listed and was moved away or removed before it was read."""

    exit_code = StorageError.exit_code  # starting again takes another one


def not_saved(folder: epath.Path, error: Exception, latest: int | None) -> StorageError:
    """The error to raise in place of one that came out of a save."""
    explicable = "No space left" in str(error) or (storage.is_remote(folder) and storage.is_outage(error))
    why = storage.reason(error) if explicable else storage.first_line(error)
    kept = "there is no complete one yet" if latest is None else f"the latest complete one is step {latest}"
    return StorageError(
        f"{folder}: saving a checkpoint failed: {why}; {kept}. "
        "Free some space or mend the folder; a run that has ended goes on with the same command"
    )


def not_read(folder: epath.Path, step: int, error: Exception, steps: Iterable[int]) -> Exception:
    """The error to raise in place of one that came out of a read."""
    if isinstance(error, jax.errors.JaxRuntimeError | MemoryError):
        return error
    path = folder / str(step)
    outage = storage.is_remote(folder) and storage.is_outage(error)
    if not outage and _is_gone(path):
        return _vanished(path)
    if outage or _may_pass(error):
        why = storage.reason(error)
        return StorageError(f"{path} cannot be read now: {why}. It was left as it is; start again later")
    return _damaged(folder, step, storage.first_line(error), steps)


def wrong_contents(folder: epath.Path, step: int, why: str, steps: Iterable[int]) -> CheckpointError:
    """The error for files that could be read and do not hold what was saved."""
    return _vanished(folder / str(step)) if _is_gone(folder / str(step)) else _damaged(folder, step, why, steps)


def check_same_model(path: epath.Path, wanted: dict[str, Any], stored: dict[str, Leaf], *, whole: bool) -> None:
    """Shapes and types of what is wanted; with `whole`, also that there is nothing else."""
    lines = []
    names = ((stored.keys() | wanted.keys()) if whole else wanted.keys()) - {CHECKSUMS}
    for name in sorted(names, key=lambda name: (not name.startswith("params."), name)):
        ours = (tuple(wanted[name].shape), jnp.dtype(wanted[name].dtype)) if name in wanted else None
        if stored.get(name) != ours:
            lines.append(f"{name}: {_describe(stored.get(name))} in the checkpoint, {_describe(ours)} in this config")
    if lines:
        shown = lines[:8] + ([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])
        raise CheckpointError(
            f"{path} is of another model or state:\n  "
            + "\n  ".join(shown)
            + "\nIt was left as it is. Use the run's own config, or another --run folder"
        )


def _is_gone(path: epath.Path) -> bool:
    """Whether a checkpoint was moved away or removed. A local one goes at once; one in a store file by file, in any
    order: as long as that goes on, its marker may still be there."""
    if not storage.is_remote(path):
        with suppress(OSError):
            return not path.exists()
        return False
    before: list[str] | None = None
    with storage.explained(path):
        while (files := sorted(storage.files_under(path))) != before:
            if MARKER not in files:
                return True
            before = files
            time.sleep(LOOK_AGAIN_S)
    return False


def _may_pass(error: BaseException | None) -> bool:
    """Whether a file system that refused (no rights, no handles, no network) is behind an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            return True
        if REFUSED.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _vanished(path: epath.Path) -> VanishedError:
    return VanishedError(
        f"{path} was removed or moved away before it was read, as a run that trains does with its older checkpoints. "
        "Start again: another one is taken"
    )


def _damaged(folder: epath.Path, step: int, why: str, steps: Iterable[int]) -> DamagedError:
    earlier = max((s for s in steps if s < step), default=None)
    advice = (
        f"there is none before it in {folder}; start again in another --run folder"
        if earlier is None
        else f"the one before it is step {earlier}: `tinypod train` goes on from there with --from-step {earlier} "
        f"(newer ones are moved to {SET_ASIDE}/, not deleted), other commands use it with --checkpoint {earlier}"
    )
    return DamagedError(f"{folder / str(step)} is damaged: {why}\nIt was left as it is; {advice}")


def _describe(leaf: Leaf | None) -> str:
    return "absent" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
