"""What lies in a folder of checkpoints and is none: the rest of a save, what waits for its removal, what was copied
without its marker; and moving checkpoints out of the way. For process 0 alone, except `set_aside`."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from etils import epath

from tinypod.runs import storage

SET_ASIDE = "checkpoints_set_aside"
DELETED = "deleted"  # where a local checkpoint waits for its removal: half a checkpoint must not bear a step's name
UNFINISHED = ".orbax-checkpoint-tmp"
MARKER = storage.MARKER


@dataclass(frozen=True)
class Incomplete:
    """Something in the folder that is no complete checkpoint."""

    path: str
    why: str
    is_ours: bool = False  # the rest of a save of ours, to be removed

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


def find_incomplete(folder: epath.Path) -> Iterator[Incomplete]:
    """What looks like a checkpoint and is not complete."""
    cut_off = "a save was cut off here; the next `tinypod train` removes it"
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        if UNFINISHED in path.name:
            yield Incomplete(str(path), cut_off, is_ours=True)
        elif storage.is_remote(folder) and path.name.isdigit() and not (path / MARKER).exists():
            if _was_cut_off(path):
                yield Incomplete(str(path), cut_off, is_ours=True)
            else:
                why = f"it has no {MARKER} (copied without it, or not to the end); it is left as it is. "
                yield Incomplete(str(path), why + f"If you know it to be whole, put a file of that name into {path}")


def clean(folder: epath.Path) -> None:
    """Make the folder, and remove what saves that were cut off left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for found in list(find_incomplete(folder)):
        if found.is_ours:
            with suppress(OSError):  # what is still on its way into it can come in between; then next time
                epath.Path(found.path).rmtree(missing_ok=True)
    remove_deleted(folder)


def remove_deleted(folder: epath.Path) -> None:
    if not storage.is_remote(folder) and (folder / DELETED).exists():
        (folder / DELETED).rmtree(missing_ok=True)


def make_way(folder: epath.Path, step: int) -> None:
    """Before a save to a store: Orbax would delete what stands, incomplete, under this step's name."""
    path = folder / str(step)
    if not storage.is_remote(folder) or not path.exists():
        return
    if _was_cut_off(path):
        path.rmtree()
    else:
        set_aside(folder, step)


def set_aside(folder: epath.Path, step: int) -> epath.Path:
    """Move a checkpoint beside the folder; returns where it is now."""
    target = folder.parent / SET_ASIDE / str(step)
    number = 1
    while target.exists():
        target, number = target.with_name(f"{step}.{number}"), number + 1
    storage.move(folder / str(step), target, MARKER)
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
