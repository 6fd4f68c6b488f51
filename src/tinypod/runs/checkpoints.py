"""Checkpoints: `checkpoints/<step>/` holds `state` (every leaf of the TrainState under its dotted path, and a checksum
of each) and `info` (the config and what else the run says about itself).

Every process writes its shards in the background. A checkpoint is visible only when it is complete: a local folder gets
its name last, a `gs://` folder its marker `commit_success.txt`. Orbax does not notice a flipped bit in an array, so a
restore recomputes the checksums. A checkpoint that cannot be read is refused and left as it is, and the one before it
is offered. Scores are no part of a checkpoint, because they may come later: whoever opens the folder knows them.

With several processes each makes the same calls of save, wait, restore and set_aside_after in the same order; process 0
alone moves, removes and chooses what is removed. They meet at barriers that have deadlines.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath
from jax import Array
from jax.sharding import SingleDeviceSharding

from tinypod import __version__
from tinypod.cluster.agreement import Cluster
from tinypod.errors import CheckpointError, UserError
from tinypod.runs import failures, orbax_manager, set_aside, storage
from tinypod.runs.checksums import checksums, flatten, make_checksums, replicated_like
from tinypod.runs.failures import CHECKSUMS
from tinypod.runs.retention import Retention, ScoreOf
from tinypod.runs.set_aside import Incomplete
from tinypod.step import TrainState

CARRY, LEFT_OUT = "carry", "left_out"  # a part of the state; where `info` lists those that are not stored


class Checkpoints:
    """The checkpoints of one run, in a local folder or at `gs://bucket/folder`.

    `score_of` gives the score of a step, or None. It is asked at every save, in process 0 alone, about each checkpoint
    there is; and by `best`, in the process that calls it.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        cluster: Cluster | None = None,
        keep_last: int | None = None,
        keep_every_hours: float | None = None,
        score_of: ScoreOf = lambda step: None,
        best_mode: Literal["max", "min"] = "max",
        read_only: bool = False,
        timeout_s: int = 600,
    ) -> None:
        self.folder = storage.folder(folder)
        self._cluster, self._read_only, self._timeout_s = cluster or Cluster(), read_only, timeout_s
        self._retention = Retention(keep_last, keep_every_hours, score_of, best_mode, self._in_primary)
        self._remote = storage.is_remote(self.folder)
        self._checksums: Callable[[dict[str, Array]], Array] = checksums
        self._last_tried: int | None = None
        self._failed: set[int] = set()  # steps whose save failed: what was still on its way may have come after
        self._manager: Any = self._open()
        self._complete = self.steps()  # before the save at hand

    def steps(self) -> list[int]:
        """Complete ones, and the one that is being saved; as of the last look (see `reload`)."""
        return self._complete if self._manager is None else sorted(self._manager.all_steps())

    def complete(self, step: int) -> int:
        """The last one up to a step that is on disk for sure, by what is known already: no file is looked at."""
        return max((known for known in self._complete if known <= step), default=0)

    def reload(self) -> None:
        """Look into the folder again: another process may have saved and removed checkpoints."""
        with storage.explained(self.folder):
            orbax_manager.while_some_vanish(self._opened().reload)

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> tuple[int, float] | None:
        """The step with the best score, and that score; of equals the latest. None: no checkpoint has a score."""
        return self._retention.best(self.steps())

    def incomplete(self) -> list[Incomplete]:
        """What looks like a checkpoint and is not complete. It is kept, unless a save of ours was cut off there."""
        with storage.explained(self.folder):
            return list(set_aside.find_incomplete(self.folder))

    def prepare(self, abstract: TrainState) -> None:
        """Compile what a save needs, so that nothing compiles at the first one."""
        self._checksums = make_checksums(flatten(abstract))

    def save(self, state: TrainState, about: dict[str, Any]) -> None:
        """Start saving; the arrays are copied before this returns, the files are written behind it.

        `about` goes into `info`. A StorageError here or from `wait` leaves the checkpoints as they were, and the next
        save is free to succeed.
        """
        self._save(int(state.step), flatten(state), about)

    def _save(self, step: int, flat: dict[str, Array], about: dict[str, Any]) -> None:
        flat[CHECKSUMS] = self._checksums(flat)
        with storage.translated(self._not_saved):
            manager = self._opened()
            manager.wait_until_finished()
            self._complete, self._last_tried = self.steps(), step
            self._in_primary("saving", lambda: self._make_way(step))
            orbax_manager.start_saving(manager, step, flat, {"tinypod": __version__, **about})

    def wait(self) -> None:
        """Until what was started is on disk."""
        with storage.translated(self._not_saved):
            if self._manager is not None:
                self._manager.wait_until_finished()
                self._complete = self.steps()
                self._tidy()

    def close(self) -> None:
        with storage.translated(self._not_saved):
            if self._manager is not None:
                self._manager.close()
                self._tidy()

    def restore(self, step: int, abstract: Any) -> Any:
        """A TrainState, or a part such as {"params": …, "ema": …}, in the shapes and shardings asked for; of a part
        nothing else is read. An error says what differs."""
        flat = self._read(step, flatten(abstract), whole=isinstance(abstract, TrainState))
        return jax.tree.unflatten(jax.tree.structure(abstract), [flat[name] for name in flatten(abstract)])

    def info(self, step: int) -> dict[str, Any]:
        """What was stored beside the state: the config, the dataset's hashes."""
        self._check_exists(step)
        with self._reading(step) as reader:
            return orbax_manager.read_info(reader, step)

    def copy_without_carry(self, step: int, folder: Path | str) -> None:
        """Write a checkpoint to another folder without what its rows were thinking; `info` says so (LEFT_OUT)."""
        self._check_exists(step)
        with self._reading(step) as reader:
            stored = orbax_manager.stored_leaves(reader, step)
        here = SingleDeviceSharding(jax.local_devices()[0])
        kept = {name: leaf for name, leaf in stored.items() if name.split(".")[0] not in (CARRY, CHECKSUMS)}
        wanted = {name: jax.ShapeDtypeStruct(*leaf, sharding=here) for name, leaf in kept.items()}
        copy = Checkpoints(folder, timeout_s=self._timeout_s)
        copy._save(step, self._read(step, wanted, whole=False), self.info(step) | {LEFT_OUT: [CARRY]})
        copy.wait()
        copy.close()

    def set_aside_after(self, step: int) -> list[epath.Path]:
        """Move the checkpoints after a step out of the way, so that the run can resume from it; 0: from its beginning.

        Returns where they are now; in process 0, which moves them.
        """
        if step:
            self._check_exists(step)
        moved: list[epath.Path] = []
        newer = [s for s in self.steps() if s > step]
        with storage.explained(self.folder):
            self._in_primary("moving away", lambda: moved.extend(set_aside.set_aside(self.folder, s) for s in newer))
            self._opened().reload()
        return moved

    def set_aside_damaged(self, step: int) -> None:
        """Move one checkpoint out of the way; every process may, without the others, and the first one does."""
        with storage.explained(self.folder):
            with suppress(FileNotFoundError):
                set_aside.set_aside(self.folder, step)
            self._opened().reload()

    def _read(self, step: int, wanted: dict[str, Any], *, whole: bool) -> dict[str, Array]:
        self._check_exists(step)
        with self._reading(step) as reader:
            stored = orbax_manager.stored_leaves(reader, step)
            failures.check_same_model(self.folder / str(step), wanted, stored, whole=whole)
            names = sorted(stored.keys() - {CHECKSUMS})
            if CHECKSUMS not in stored or stored[CHECKSUMS][0] != (len(names),):
                raise failures.wrong_contents(self.folder, step, f"it has no {CHECKSUMS} of its arrays", self.steps())
            one_each = jax.ShapeDtypeStruct((len(names),), jnp.uint32, sharding=replicated_like(wanted.values()))
            restored = orbax_manager.read_leaves(reader, step, wanted | {CHECKSUMS: one_each})
            if whole:
                orbax_manager.read_info(reader, step)  # a run that resumes needs it
        expected = dict(zip(names, jax.device_get(restored.pop(CHECKSUMS)), strict=True))
        # Of all processes, and thus outside of `_reading`: one that is gone is no fault of the files.
        found = dict(zip(sorted(restored), jax.device_get(checksums(restored)), strict=True))
        if wrong := [name for name in found if found[name] != expected[name]]:
            why = f"the contents of {', '.join(wrong[:3])} are not what was saved"
            raise failures.wrong_contents(self.folder, step, why, self.steps())
        return restored

    @contextmanager
    def _reading(self, step: int) -> Iterator[Any]:
        """The manager to read with, and what its errors mean."""
        with storage.translated(lambda error: failures.not_read(self.folder, step, error, self.steps())):
            manager = self._opened()
            # In an object store, for several processes, another one: in those that do not commit, the one that has
            # saved still takes the last checkpoint for unfinished (Orbax 0.12).
            if self._remote and not self._read_only and self._cluster.count > 1:
                manager.wait_until_finished()
                with self._new_manager(read_only=True) as reader:
                    yield reader
            else:
                yield manager

    def _check_exists(self, step: int) -> None:
        if step not in self.steps():
            listed = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; there are: {listed}")

    def _not_saved(self, error: Exception) -> Exception:
        """After a failure the manager remembers steps that it did not save; what counts is what is there: reopen.

        Not with several processes: opening is for all of them, a failure may be one's own, and their run ends with it.
        """
        if self._last_tried is not None:
            self._failed.add(self._last_tried)
        if self._cluster.count == 1:
            manager, self._manager = self._manager, None
            with suppress(Exception):
                manager.close()
            with suppress(UserError, OSError):
                self._manager = self._open()
        return failures.not_saved(self.folder, error, self.latest())

    def _make_way(self, step: int) -> None:
        self._tidy()
        set_aside.make_way(self.folder, step)

    def _tidy(self) -> None:
        """Between saves, in process 0: what was deleted, and what failed saves left, which may still have come in."""
        if self._read_only or not self._cluster.is_primary:
            return
        set_aside.remove_deleted(self.folder)
        if self._failed:
            set_aside.clean(self.folder)
            for failed in self._failed - set(self.steps()) if self._remote else ():
                (self.folder / str(failed)).rmtree(missing_ok=True)
            if not any(found.is_ours for found in set_aside.find_incomplete(self.folder)):
                self._failed.clear()

    def _open(self) -> Any:
        with storage.translated(lambda error: failures.not_opened(self.folder, error)):
            if not self._read_only:
                self._in_primary("opening", self._make_folder)
            return self._new_manager(self._read_only)

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        set_aside.clean(self.folder)

    def _new_manager(self, read_only: bool) -> Any:
        retention = None if read_only else self._retention
        return orbax_manager.open_manager(self.folder, retention, self._cluster.count, self._timeout_s)

    def _opened(self) -> Any:
        if self._manager is None:
            self._manager = self._open()
        return self._manager

    def _in_primary(self, name: str, work: Callable[[], Any]) -> Any:
        return self._cluster.in_primary(f"{self.folder}: {name}", work, self._timeout_s)
