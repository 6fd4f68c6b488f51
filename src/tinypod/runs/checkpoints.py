"""Checkpoints: the only module that imports Orbax.

`checkpoints/<step>/` holds `state` (every leaf of the TrainState under its dotted path, and a checksum of each) and
`info` (the config and what else the run says about itself). Every process writes its shards in the background. A
checkpoint is visible only when it is complete: a local folder gets its name last, a `gs://` folder its marker
`commit_success.txt`. Orbax does not notice a flipped bit in an array, so a restore recomputes the checksums. A
checkpoint that cannot be read is refused and left as it is, and the one before it is offered.

With several processes each constructs `Checkpoints` and makes the same calls of save, wait, restore and
set_aside_after in the same order; process 0 alone moves and removes. They meet at barriers that have deadlines.
"""

import errno
import functools
import json
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers
from orbax.checkpoint._src.serialization import tensorstore_utils

from tinypod import __version__
from tinypod.cluster.startup import Cluster
from tinypod.errors import CheckpointError, DamagedError, StorageError, UserError
from tinypod.runs import storage
from tinypod.runs.checksums import checksums, everywhere, flatten
from tinypod.step import TrainState

SET_ASIDE = "checkpoints_set_aside"
CHECKSUMS = "checksums"  # the leaf beside the state's own
DELETED = "deleted"  # where a local checkpoint waits for its removal: half a checkpoint must not bear a step's name
MARKER = storage.MARKER
REFUSED = re.compile(r"PERMISSION_DENIED|RESOURCE_EXHAUSTED|Permission denied|Too many open|Input/output error")
UNFINISHED = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class Incomplete:
    """Something in the folder that is no complete checkpoint."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class Checkpoints:
    """The checkpoints of one run, in a local folder or at `gs://bucket/folder`."""

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["max", "min"] = "max",
        keep_every_hours: float | None = None,
        read_only: bool = False,
        timeout_s: int = 600,
    ) -> None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax tells of every option, and of errors twice
        _hush_tensorstore()
        self.folder = storage.folder(folder)
        self.best_metric, self.best_mode = best_metric, best_mode
        self._keep_last, self._keep_every_hours = keep_last, keep_every_hours
        self._read_only, self._timeout_s = read_only, timeout_s
        self._remote = storage.is_remote(self.folder)
        if self._remote:
            _limit_retries()
        self._known_steps: list[int] = []
        self._complete: list[int] = []  # before the save at hand
        self._last_tried: int | None = None
        self._failed: set[int] = set()  # steps whose save failed: what was still on its way may have come after
        self._manager: ocp.CheckpointManager | None = self._open()
        self._complete = self.steps()

    def _open(self) -> ocp.CheckpointManager:
        try:
            if not self._read_only:
                self._in_primary("opening", self._clean)
            return self._new_manager(self._read_only)
        except OSError as error:
            if self._remote:
                raise StorageError(f"{self.folder}: {storage.reason(error)}") from error
            raise
        except Exception as error:
            if self._is_outage(error):
                raise StorageError(f"{self.folder}: {storage.reason(error)}; start again once it answers") from error
            raise CheckpointError(
                f"{self.folder}: a checkpoint here cannot be read: {storage.first_line(error)}"
            ) from error

    def _new_manager(self, read_only: bool) -> ocp.CheckpointManager:
        # With its processes named, Orbax waits for them through the coordinator and with a deadline; otherwise by a
        # collective on the devices, which waits for ever.
        processes = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=_processes())
        policies, best_fn = self._policies()
        return ocp.CheckpointManager(
            self.folder,
            # Named here, because a process that has not saved yet would not know how to read what is described.
            item_handlers={
                "state": ocp.StandardCheckpointHandler(multiprocessing_options=processes),
                "info": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
            },
            options=ocp.CheckpointManagerOptions(
                create=False,
                read_only=read_only,
                best_fn=best_fn,  # without it, metrics are not written; the policy decides what is kept
                best_mode=self.best_mode,
                preservation_policy=None if read_only else checkpoint_managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=False,  # it would delete what was copied without its marker; see _clean
                todelete_subdir=None if read_only else DELETED,
                async_options=ocp.AsyncOptions(timeout_secs=self._timeout_s),
                multiprocessing_options=processes,
            ),
        )

    def _policies(self) -> tuple[list[Any], Any]:
        policies: list[Any] = [checkpoint_managers.LatestN(self._keep_last)]
        if self._keep_every_hours is not None:
            policies.append(checkpoint_managers.EveryNSeconds(round(3600 * self._keep_every_hours)))
        if (metric := self.best_metric) is None:
            return policies, None
        worst = -math.inf if self.best_mode == "max" else math.inf

        def best_fn(metrics: dict[str, float]) -> float:
            return metrics.get(metric, worst)

        reverse = self.best_mode == "min"
        policies.append(
            checkpoint_managers.BestN(
                get_metric_fn=best_fn, reverse=reverse, n=1, keep_checkpoints_without_metrics=False
            )
        )
        return policies, best_fn

    def steps(self) -> list[int]:
        """Complete ones, and the one that is being saved."""
        if self._manager is not None:
            self._known_steps = sorted(self._manager.all_steps())
        return self._known_steps

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> tuple[int, float] | None:
        """The step with the best metric, and that metric."""
        scored = []
        for step in self.steps():
            try:
                metrics = self._opened().metrics(step) or {}
            except Exception:  # its own restore will say what is wrong with it
                continue
            if self.best_metric in metrics:
                scored.append((step, float(metrics[self.best_metric])))
        sign = 1 if self.best_mode == "max" else -1
        return max(scored, key=lambda item: (sign * item[1], item[0]), default=None)

    def incomplete(self) -> list[Incomplete]:
        """What looks like a checkpoint and is not complete. It is kept, unless a save of ours was cut off there."""
        with storage.explained(self.folder):
            return [Incomplete(str(path), why) for path, why, _ in self._incomplete()]

    def _incomplete(self) -> Iterator[tuple[epath.Path, str, bool]]:
        """Each with the reason, and whether it is the rest of a save of ours."""
        for path in sorted(self.folder.iterdir()) if self.folder.exists() else []:
            if UNFINISHED in path.name:
                yield path, "a save was cut off here; the next `tinypod train` removes it", True
            elif self._remote and path.name.isdigit() and not (path / MARKER).exists():
                if _was_cut_off(path):
                    yield path, "a save was cut off here; the next `tinypod train` removes it", True
                else:
                    why = f"it has no {MARKER} (copied without it, or not to the end); it is left as it is. "
                    yield path, why + f"If you know it to be whole, put a file of that name into {path}", False

    def _clean(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path, _, is_ours in list(self._incomplete()):
            if is_ours:
                with suppress(OSError):  # what is still on its way into it can come in between; then next time
                    path.rmtree(missing_ok=True)
        self._purge()

    def _purge(self) -> None:
        if not self._remote and (self.folder / DELETED).exists():
            (self.folder / DELETED).rmtree(missing_ok=True)

    def _tidy(self) -> None:
        """Between saves, in process 0: what was deleted, and what failed saves left, which may still have come in."""
        self._purge()
        if self._failed:
            self._clean()
            for failed in self._failed - set(self.steps()) if self._remote else ():
                (self.folder / str(failed)).rmtree(missing_ok=True)
            if not any(is_ours for _, _, is_ours in self._incomplete()):
                self._failed.clear()

    def save(self, state: TrainState, about: dict[str, Any], metrics: dict[str, float] | None = None) -> None:
        """Start saving; the arrays are copied before this returns, the files are written behind it.

        `about` goes into `info`; `metrics` decide which checkpoint is the best. A StorageError here or from `wait`
        leaves the checkpoints as they were, and the next save is free to succeed.
        """
        flat = flatten(state)
        flat[CHECKSUMS] = checksums(flat)
        step = int(state.step)
        info = {"tinypod": __version__, **about}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(flat), info=ocp.args.JsonSave(info))
        with self._saving():
            manager = self._opened()
            manager.wait_until_finished()
            self._complete, self._last_tried = self.steps(), step
            self._in_primary("saving", lambda: self._make_way(step))
            manager.save(step, args=arguments, metrics=metrics, force=True)

    def wait(self) -> None:
        """Until what was started is on disk."""
        with self._saving():
            if self._manager is not None:
                self._manager.wait_until_finished()
                self._complete = self.steps()
                if _cluster().is_primary and not self._read_only:
                    self._tidy()

    def close(self) -> None:
        with self._saving():
            if self._manager is not None:
                self._manager.close()
                if _cluster().is_primary and not self._read_only:
                    self._tidy()

    def _make_way(self, step: int) -> None:
        """Orbax would delete what stands under this step's name."""
        self._tidy()
        path = self.folder / str(step)
        if not self._remote or step in self.steps() or not path.exists():
            return
        if _was_cut_off(path):
            path.rmtree()
        else:
            self._set_aside(step)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # Orbax and TensorStore raise bare Exceptions too
            self._known_steps = self._complete
            if self._last_tried is not None:
                self._failed.add(self._last_tried)
            self._reopen()
            latest = self.latest()
            kept = "there is no complete one yet" if latest is None else f"the latest complete one is step {latest}"
            why = storage.reason(error) if self._is_outage(error) or _is_full(error) else storage.first_line(error)
            raise StorageError(
                f"{self.folder}: saving a checkpoint failed: {why}; {kept}. "
                "Free some space or mend the folder; a run that has ended goes on with the same command"
            ) from error

    def _reopen(self) -> None:
        """After a failure the manager remembers steps that it did not save; what counts is what is there.

        Not with several processes: opening is for all of them, a failure may be one's own, and their run ends with it.
        """
        if _processes() is not None:
            return
        if self._manager is not None:
            with suppress(Exception):
                self._manager.close()
        self._manager = None
        with suppress(UserError, OSError):
            self._manager = self._open()

    def _opened(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = self._open()
        return self._manager

    @contextmanager
    def _reader(self) -> Iterator[ocp.CheckpointManager]:
        """The manager; in an object store, for several processes, another one: in those that do not commit, the one
        that has saved goes on to take the last checkpoint for unfinished (Orbax 0.12)."""
        manager = self._opened()
        if not self._remote or self._read_only or _processes() is None:
            yield manager
            return
        manager.wait_until_finished()
        with self._new_manager(read_only=True) as reader:
            yield reader

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a step in the shapes and shardings asked for; else an error that says what differs."""
        self._check_exists(step)
        wanted = flatten(abstract)
        names = sorted(wanted)
        whole = everywhere(wanted.values())
        wanted[CHECKSUMS] = jax.ShapeDtypeStruct((len(names),), jnp.uint32, sharding=whole)
        self._check_same_model(step, wanted)
        try:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), info=ocp.args.JsonRestore())
            with self._reader() as reader:
                restored = reader.restore(step, args=items)["state"]
        except Exception as error:  # Orbax and TensorStore raise bare Exceptions too
            raise self._unreadable(step, error) from error
        expected = jax.device_get(restored.pop(CHECKSUMS))
        found = jax.device_get(checksums(restored))  # of all processes: one that is gone is no fault of the files
        wrong = [name for name, a, b in zip(names, found, expected, strict=True) if a != b]
        if wrong:
            raise self._damaged(step, f"the contents of {', '.join(wrong[:3])} are not what was saved")
        return jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in flatten(abstract)])

    def info(self, step: int) -> dict[str, Any]:
        """What was stored beside the state: the config, the dataset's hashes."""
        self._check_exists(step)
        try:
            with self._reader() as reader:
                return dict(reader.restore(step, args=ocp.args.Composite(info=ocp.args.JsonRestore()))["info"])
        except Exception as error:
            raise self._unreadable(step, error) from error

    def set_aside_after(self, step: int) -> list[epath.Path]:
        """Move the checkpoints after a step out of the way, so that the run can go on from it; 0: from its beginning.

        Returns where they are now; in process 0, which moves them.
        """
        if step:
            self._check_exists(step)
        moved: list[epath.Path] = []
        newer = [s for s in self.steps() if s > step]
        with storage.explained(self.folder):
            self._in_primary("setting aside", lambda: moved.extend(self._set_aside(s) for s in newer))
            self._opened().reload()
        return moved

    def set_aside_damaged(self, step: int) -> None:
        """Move one checkpoint out of the way; every process may, without the others, and the first one does."""
        with storage.explained(self.folder):
            with suppress(FileNotFoundError):
                self._set_aside(step)
            self._opened().reload()

    def _set_aside(self, step: int) -> epath.Path:
        target = self.folder.parent / SET_ASIDE / str(step)
        number = 1
        while target.exists():
            target, number = target.with_name(f"{step}.{number}"), number + 1
        storage.move(self.folder / str(step), target, MARKER)
        return target

    def _in_primary(self, name: str, work: Callable[[], None]) -> None:
        """Work that process 0 does while the others wait; if it fails, it fails in all of them."""
        error: Exception | None = None
        if _cluster().is_primary:
            try:
                work()
            except Exception as caught:
                error = caught
        told = _cluster().agree(f"checkpoints: {name}", repr(error) if error else "", self._timeout_s)
        if error is not None:
            raise error
        if told:
            raise StorageError(f"{self.folder}: process 0 could not do its part: {told}")

    def _check_exists(self, step: int) -> None:
        if step not in self.steps():
            listed = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; there are: {listed}")

    def _check_same_model(self, step: int, wanted: dict[str, Any]) -> None:
        try:
            with self._reader() as reader:
                tree = reader.item_metadata(step)["state"].tree
            stored = {name: (tuple(leaf.shape), jnp.dtype(leaf.dtype)) for name, leaf in tree.items()}
        except Exception as error:
            raise self._unreadable(step, error) from error
        lines = []
        names = (stored.keys() | wanted.keys()) - {CHECKSUMS}
        for name in sorted(names, key=lambda name: (not name.startswith("params."), name)):
            ours = (tuple(wanted[name].shape), jnp.dtype(wanted[name].dtype)) if name in wanted else None
            if stored.get(name) != ours:
                lines.append(
                    f"{name}: {_describe(stored.get(name))} in the checkpoint, {_describe(ours)} in this config"
                )
        if lines:
            shown = lines[:8] + ([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])
            raise CheckpointError(
                f"{self.folder / str(step)} is of another model or state:\n  "
                + "\n  ".join(shown)
                + "\nIt was left as it is. Use the run's own config, or another --run folder"
            )
        if CHECKSUMS not in stored:
            raise self._damaged(step, f"it has no {CHECKSUMS}")

    def _unreadable(self, step: int, error: Exception) -> Exception:
        """What a failed read means. A checkpoint is called damaged only where nothing else can be the reason."""
        if isinstance(error, jax.errors.JaxRuntimeError | MemoryError):
            return error
        if self._is_outage(error) or _may_pass(error):
            path, why = self.folder / str(step), storage.reason(error)
            return StorageError(f"{path} cannot be read now: {why}. It was left as it is; start again later")
        return self._damaged(step, storage.first_line(error))

    def _damaged(self, step: int, why: str) -> DamagedError:
        earlier = max((s for s in self.steps() if s < step), default=None)
        advice = (
            f"there is none before it in {self.folder}; start again in another --run folder"
            if earlier is None
            else f"the one before it is step {earlier}: `tinypod train` goes on from there with --from-step {earlier} "
            f"(newer ones are moved to {SET_ASIDE}/, not deleted), other commands use it with --checkpoint {earlier}"
        )
        return DamagedError(f"{self.folder / str(step)} is damaged: {why}\nIt was left as it is; {advice}")

    def _is_outage(self, error: Exception) -> bool:
        return self._remote and storage.is_outage(error)


def _may_pass(error: BaseException | None) -> bool:
    """Whether a file system that refused (no rights, no handles, no network) is behind an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            return True
        if REFUSED.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _was_cut_off(path: epath.Path) -> bool:
    """Whether a save of ours began here and did not come to its end: its own notes say so.

    A complete checkpoint notes when it was committed, and keeps that note wherever it is copied.
    """
    try:
        notes = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return bool(notes.get("init_timestamp_nsecs")) and not notes.get("commit_timestamp_nsecs")
    except (FileNotFoundError, ValueError, AttributeError):
        return False


@functools.cache
def _cluster() -> Cluster:
    return Cluster(jax.process_index(), jax.process_count())


def _processes() -> set[int] | None:
    return set(range(_cluster().count)) if _cluster().count > 1 else None


def _is_full(error: Exception) -> bool:
    return "No space left" in str(error)


def _limit_retries() -> None:
    """By default TensorStore asks a store that is down for a quarter of an hour; Orbax has no option for it."""
    for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
        context["gcs_request_retries"] = storage.tensorstore_retries()


@functools.cache
def _hush_tensorstore() -> None:
    """After a failure, the reads and writes still on their way complain that nobody waits for them: not on stderr."""
    excepthook, unraisablehook = sys.excepthook, sys.unraisablehook

    def abandoned(error: Any) -> bool:
        # A coroutine that is thrown away ends with GeneratorExit, which Orbax turns into an error of its own.
        return "Event loop is closed" in str(error) or isinstance(getattr(error, "__cause__", None), GeneratorExit)

    def on_exception(kind: Any, error: Any, trace: Any) -> None:
        if not abandoned(error):
            excepthook(kind, error, trace)

    def on_unraisable(unraisable: Any) -> None:
        if not abandoned(unraisable.exc_value):
            unraisablehook(unraisable)

    def is_worth_saying(record: logging.LogRecord) -> bool:
        return "was never retrieved" not in record.getMessage()  # siblings of the write that failed, and was told

    sys.excepthook, sys.unraisablehook = on_exception, on_unraisable
    logging.getLogger("asyncio").addFilter(is_worth_saying)
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)


def _describe(leaf: tuple[tuple[int, ...], Any] | None) -> str:
    return "absent" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
