"""What it means that checkpoints cannot be opened, saved or read: of another model, gone, on a disk or store in
trouble, or damaged. One is called damaged only where nothing else can be the reason."""

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
from tinypod.runs.set_aside import SET_ASIDE

CHECKSUMS = "checksums"  # the leaf beside the state's own
REFUSED = re.compile(r"PERMISSION_DENIED|RESOURCE_EXHAUSTED|Permission denied|Too many open|Input/output error")
LOOK_AGAIN_S = 1.0
Leaf = tuple[tuple[int, ...], Any]  # shape and dtype


class VanishedError(CheckpointError):
    """A checkpoint that was there when it was listed and was moved away or removed before it was read."""

    exit_code = StorageError.exit_code  # starting again takes another one


def not_opened(folder: epath.Path, error: Exception) -> Exception:
    """The error to raise in place of one that came out of opening a folder."""
    if storage.is_remote(folder) and (
        isinstance(error, OSError) or storage.status_of(error) or storage.is_outage(error)
    ):
        return storage.explain(folder, error)
    if isinstance(error, OSError):
        return error
    return CheckpointError(f"{folder}: a checkpoint here cannot be read: {storage.first_line(error)}")


def not_saved(folder: epath.Path, error: Exception, latest: int | None) -> StorageError:
    """The error to raise in place of one that came out of a save."""
    kept = "there is no complete one yet" if latest is None else f"the latest complete one is step {latest}"
    return StorageError(
        f"{folder}: saving a checkpoint failed: {storage.reason(folder, error)}; {kept}. "
        "Free some space or repair the folder; if the run has ended, run it again to resume"
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
        why = storage.reason(folder, error)
        return StorageError(f"{path} cannot be read now: {why}. It was left as it is; start again later")
    return _damaged(folder, step, storage.first_line(error), steps)


def wrong_contents(folder: epath.Path, step: int, why: str, steps: Iterable[int]) -> CheckpointError:
    """The error for files that could be read and do not hold what was saved."""
    return _vanished(folder / str(step)) if _is_gone(folder / str(step)) else _damaged(folder, step, why, steps)


def check_same_model(path: epath.Path, wanted: dict[str, Any], stored: dict[str, Leaf], *, whole: bool) -> None:
    """Shapes and types of what is wanted; with `whole`, also that there is nothing else."""
    lines = []
    ours = {name: (tuple(leaf.shape), jnp.dtype(leaf.dtype)) for name, leaf in wanted.items()}
    names = (stored.keys() | ours.keys() if whole else ours.keys()) - {CHECKSUMS}
    for name in sorted(names, key=lambda name: (not name.startswith("params."), name)):
        there, here = stored.get(name), ours.get(name)
        if there != here:
            lines.append(f"{name}: {_describe(there)} in the checkpoint, {_describe(here)} in this config")
    if lines:
        shown = "\n  ".join(lines[:8] + ([f"and {len(lines) - 8} more"] if len(lines) > 8 else []))
        raise CheckpointError(
            f"{path} is of another model or state:\n  {shown}\n"
            "It was left as it is. Use the run's own config, or another --run folder"
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
            if storage.MARKER not in files:
                return True
            before = files
            time.sleep(LOOK_AGAIN_S)
    return False


def _may_pass(error: BaseException) -> bool:
    """Whether a file system that refused (no rights, no handles, no network) is behind an error."""
    return any(
        (isinstance(link, OSError) and link.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR))
        or REFUSED.search(str(link))
        for link in storage.chain(error)
    )


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
        else f"the one before it is step {earlier}: `tinypod train` resumes from there with --from-step {earlier} "
        f"(newer ones are moved to {SET_ASIDE}/, not deleted), other commands use it with --checkpoint {earlier}"
    )
    return DamagedError(f"{folder / str(step)} is damaged: {why}\nIt was left as it is; {advice}")


def _describe(leaf: Leaf | None) -> str:
    return "absent" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
