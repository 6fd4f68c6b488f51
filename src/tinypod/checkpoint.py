"""Checkpoints: the only module that imports Orbax.

`checkpoints/<step>/` holds `state` (every leaf of the TrainState under its dotted path) and `info` (the config and a
checksum of every leaf). Orbax writes in the background and renames a folder into place only when it is complete.
It does not notice a flipped bit in an array, so a restore recomputes the checksums. A checkpoint that cannot be read is
refused and left as it is, and the one before it is offered.
"""

import functools
import logging
import math
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import Array
from orbax.checkpoint import checkpoint_managers

from tinypod import __version__
from tinypod.errors import CheckpointError
from tinypod.step import TrainState

SET_ASIDE = "checkpoints_set_aside"


def path_of(key_path: tuple[Any, ...]) -> str:
    """A leaf's name: `params.layers.mlp.down`."""
    return jax.tree_util.keystr(key_path, simple=True, separator=".")


def flatten(tree: Any) -> dict[str, Any]:
    return {path_of(key_path): leaf for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@jax.jit
def checksums(flat: dict[str, Array]) -> dict[str, Array]:
    """A number for each array that any changed bit changes; integers, so the same on any mesh."""

    def checksum(x: Array) -> Array:
        if x.dtype == bool:
            words = x.astype(jnp.uint32)
        else:
            unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
            words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        words = words.reshape(-1)
        odd = 2 * jax.lax.iota(jnp.uint32, words.size) + 1  # so that order counts, too
        return jnp.sum(words * (odd * jnp.uint32(2654435761)), dtype=jnp.uint32)

    return jax.tree.map(checksum, flat)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["max", "min"] = "max",
        read_only: bool = False,
    ) -> None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax tells of every option, and of errors twice
        _hush_tensorstore()
        self.folder = folder.absolute()
        self.best_metric, self.best_mode = best_metric, best_mode
        policies: list[Any] = [checkpoint_managers.LatestN(keep_last)]
        best_fn = None
        if best_metric is not None:
            worst = -math.inf if best_mode == "max" else math.inf
            best_fn = lambda metrics: metrics.get(best_metric, worst)  # noqa: E731
            policies.append(
                checkpoint_managers.BestN(
                    get_metric_fn=best_fn,
                    reverse=best_mode == "min",
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        try:
            self._manager = self._open(read_only, policies, best_fn)
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.folder}: a checkpoint here cannot be read: {_first_line(error)}") from error

    def _open(self, read_only: bool, policies: list[Any], best_fn: Any) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(
            self.folder,
            # Named here, because a process that has not saved yet would not know how to read what is described.
            item_handlers={"state": ocp.StandardCheckpointHandler(), "info": ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                read_only=read_only,
                best_fn=best_fn,  # without it, metrics are not written; the policy decides what is kept
                best_mode=self.best_mode,
                preservation_policy=None if read_only else checkpoint_managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=not read_only,  # what a kill in the middle of a save left behind
            ),
        )

    def steps(self) -> list[int]:
        """Complete ones."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> tuple[int, float] | None:
        """The step with the best metric, and that metric."""
        scored = []
        for step in self.steps():
            try:
                metrics = self._manager.metrics(step) or {}
            except Exception:  # its own restore will say what is wrong with it
                continue
            if self.best_metric in metrics:
                scored.append((step, float(metrics[self.best_metric])))
        sign = 1 if self.best_mode == "max" else -1
        return max(scored, key=lambda item: (sign * item[1], item[0]), default=None)

    def save(self, state: TrainState, about: dict[str, Any], metrics: dict[str, float] | None = None) -> None:
        """Start saving; the arrays are copied before this returns, the files are written behind it.

        `about` goes into `info`; `metrics` decide which checkpoint is the best.
        """
        flat = flatten(state)
        sums = {name: int(value) for name, value in jax.device_get(checksums(flat)).items()}
        step = int(state.step)
        info = {"tinypod": __version__, **about, "checksums": sums}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(flat), info=ocp.args.JsonSave(info))
        try:
            self._manager.save(step, args=arguments, metrics=metrics, force=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._save_error(error) from error

    def wait(self) -> None:
        """Until what was started is on disk."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._save_error(error) from error

    def close(self) -> None:
        self._manager.close()

    def _save_error(self, error: Exception) -> CheckpointError:
        text = str(error)
        why = "no space left on the device" if "No space left" in text else _first_line(error)
        kept = f"the latest complete one is step {self.latest()}" if self.steps() else "there is no complete one yet"
        return CheckpointError(
            f"{self.folder}: saving a checkpoint failed: {why}; {kept}. "
            "Free some space or mend the folder, then start the same command again"
        )

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a step in the shapes and shardings asked for; else an error that says what differs."""
        self._check_exists(step)
        wanted = flatten(abstract)
        self._check_same_model(step, wanted)
        try:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), info=ocp.args.JsonRestore())
            restored = self._manager.restore(step, args=items)
            expected = restored["info"]["checksums"]
            found = jax.device_get(checksums(restored["state"]))
        except Exception as error:  # Orbax and TensorStore raise bare Exceptions too
            raise self._damaged(step, _first_line(error)) from error
        wrong = [name for name in wanted if int(found[name]) != expected.get(name)]
        if wrong:
            raise self._damaged(step, f"the contents of {', '.join(wrong[:3])} are not what was saved")
        leaves = [restored["state"][name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def info(self, step: int) -> dict[str, Any]:
        """What was stored beside the state: the config, the dataset's hashes, the checksums."""
        self._check_exists(step)
        try:
            return dict(self._manager.restore(step, args=ocp.args.Composite(info=ocp.args.JsonRestore()))["info"])
        except Exception as error:
            raise self._damaged(step, _first_line(error)) from error

    def set_aside_after(self, step: int) -> list[Path]:
        """Move the checkpoints after a step out of the way, so that the run can go on from it."""
        self._check_exists(step)
        moved = []
        for newer in [s for s in self.steps() if s > step]:
            target = self.folder.parent / SET_ASIDE / str(newer)
            number = 1
            while target.exists():
                target, number = target.with_name(f"{newer}.{number}"), number + 1
            target.parent.mkdir(exist_ok=True)
            shutil.move(self.folder / str(newer), target)
            moved.append(target)
        self._manager.reload()
        return moved

    def _check_exists(self, step: int) -> None:
        if step not in self.steps():
            listed = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.folder}: no checkpoint of step {step}; there are: {listed}")

    def _check_same_model(self, step: int, wanted: dict[str, Any]) -> None:
        try:
            tree = self._manager.item_metadata(step)["state"].tree
            stored = {name: (tuple(leaf.shape), jnp.dtype(leaf.dtype)) for name, leaf in tree.items()}
        except Exception as error:
            raise self._damaged(step, _first_line(error)) from error
        lines = []
        for name in sorted(stored.keys() | wanted.keys(), key=lambda name: (not name.startswith("params."), name)):
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

    def _damaged(self, step: int, why: str) -> CheckpointError:
        earlier = max((s for s in self.steps() if s < step), default=None)
        advice = (
            f"there is none before it in {self.folder}; start again in another --run folder"
            if earlier is None
            else f"the one before it is step {earlier}: `tinypod train` goes on from there with --from-step {earlier} "
            f"(newer ones are moved to {SET_ASIDE}/, not deleted), other commands use it with --checkpoint {earlier}"
        )
        return CheckpointError(f"{self.folder / str(step)} is damaged: {why}\nIt was left as it is; {advice}")


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

    sys.excepthook, sys.unraisablehook = on_exception, on_unraisable


def _describe(leaf: tuple[tuple[int, ...], Any] | None) -> str:
    return "absent" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


def _first_line(error: Exception) -> str:
    lines = str(error).split("See full TensorStore details")[0].splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:300]
