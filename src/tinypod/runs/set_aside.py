"""What lies in a folder of checkpoints and is none: the rest of a save, what waits for its removal, what was copied
without its marker; and moving checkpoints out of the way. For process 0 alone, except `set_aside`."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from etils import epath

from tinypod.runs import storage
from tinypod.runs.storage import MARKER

SET_ASIDE = "checkpoints_set_aside"
DELETED = "deleted"  # where a local checkpoint waits for its removal: half a checkpoint must not bear a step's name
UNFINISHED = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class Incomplete:
    """Something in the folder that is no complete checkpoint."""

    path: epath.Path
    is_ours: bool  # the rest of a save of ours, to be removed

    def __str__(self) -> str:
        if self.is_ours:
            return f"{self.path}: a save was cut off here; the next `tinypod train` removes it"
        return (
            f"{self.path}: it has no {MARKER} (copied without it, or not to the end); it is left as it is. "
            f"If you know it to be whole, put a file of that name into {self.path}"
        )


def find_incomplete(folder: epath.Path) -> Iterator[Incomplete]:
    """What looks like a checkpoint and is not complete."""
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        if UNFINISHED in path.name:
            yield Incomplete(path, is_ours=True)
        elif storage.is_remote(folder) and path.name.isdigit() and not (path / MARKER).exists():
            yield Incomplete(path, _was_cut_off(path))


def clean(folder: epath.Path) -> None:
    """Remove what saves that were cut off, and removals, left in the folder."""
    for found in list(find_incomplete(folder)):
        if found.is_ours:
            with suppress(OSError):  # what is still on its way into it can come in between; then next time
                found.path.rmtree(missing_ok=True)
    remove_deleted(folder)


def remove_deleted(folder: epath.Path) -> None:
    if not storage.is_remote(folder):
        (folder / DELETED).rmtree(missing_ok=True)


def make_way(folder: epath.Path, step: int) -> None:
    """Before a save to a store: Orbax would delete what stands, incomplete, under this step's name."""
    path = folder / str(step)
    if storage.is_remote(folder) and path.exists() and not (path / MARKER).exists():
        path.rmtree() if _was_cut_off(path) else set_aside(folder, step)


def set_aside(folder: epath.Path, step: int) -> epath.Path:
    """Move a checkpoint beside the folder; returns where it is now."""
    target = folder.parent / SET_ASIDE / str(step)
    number = 1
    while target.exists():
        target, number = target.with_name(f"{step}.{number}"), number + 1
    storage.move(folder / str(step), target)
    return target


def _was_cut_off(path: epath.Path) -> bool:
    """Whether a save of ours began here and did not come to its end: its own notes say so.

    A complete checkpoint notes when it was committed, and keeps that note wherever it is copied.
    """
    try:
        notes = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return bool(notes.get("init_timestamp_nsecs")) and not notes.get("commit_timestamp_nsecs")
    except (FileNotFoundError, ValueError, AttributeError):
        return False
