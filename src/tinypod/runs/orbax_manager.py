"""Orbax as the checkpoints use it; the only module that imports it.

What it does not do by itself: keep quiet, wait for other processes with a deadline, give up on a store that is down.
"""

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src.serialization import tensorstore_utils

from tinypod.runs import storage
from tinypod.runs.failures import Leaf
from tinypod.runs.retention import Retention
from tinypod.runs.set_aside import DELETED

LISTINGS = 3  # tries, while checkpoints vanish


def open_manager(
    folder: epath.Path, retention: Retention | None, num_processes: int, timeout_s: int
) -> ocp.CheckpointManager:
    """Without a retention it only reads."""
    _silence()
    for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
        context["gcs_request_retries"] = storage.tensorstore_retries()  # Orbax has no option for it
    # With its processes named, Orbax waits for them through the coordinator and with a deadline; otherwise by a
    # collective on the devices, which waits for ever.
    processes = set(range(num_processes)) if num_processes > 1 else None
    options = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=processes)
    # Replicas are not sliced for saving: that would compile a slice of every array at the first save.
    arrays = (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
    registry = ocp.type_handlers.create_type_handler_registry(arrays)
    open_it = functools.partial(
        ocp.CheckpointManager,
        folder,
        # Named here, because a process that has not saved yet would not know how to read what is described.
        item_handlers={
            "state": ocp.PyTreeCheckpointHandler(multiprocessing_options=options, type_handler_registry=registry),
            "info": ocp.JsonCheckpointHandler(multiprocessing_options=options),
        },
        options=ocp.CheckpointManagerOptions(
            create=False,
            read_only=retention is None,
            preservation_policy=retention,
            cleanup_tmp_directories=False,  # it would delete what was copied without its marker; see set_aside.clean
            todelete_subdir=None if retention is None else DELETED,
            async_options=ocp.AsyncOptions(timeout_secs=timeout_s),
            multiprocessing_options=options,
        ),
    )
    return while_some_vanish(open_it) if processes is None else open_it()  # opening is for all of them together


def while_some_vanish(look: Callable[[], Any]) -> Any:
    """Again, if a checkpoint vanished between being listed and being looked at."""
    for _ in range(LISTINGS - 1):
        with suppress(FileNotFoundError):
            return look()
    return look()


def start_saving(manager: ocp.CheckpointManager, step: int, flat: dict[str, Any], info: dict[str, Any]) -> None:
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(flat), info=ocp.args.JsonSave(info))
    manager.save(step, args=items, force=True)


def read_leaves(manager: ocp.CheckpointManager, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """The arrays of these names, in these shapes and shardings; nothing else of the state is read."""
    arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
    state = ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=True)
    return dict(manager.restore(step, args=ocp.args.Composite(state=state))["state"])


def read_info(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    return dict(manager.restore(step, args=ocp.args.Composite(info=ocp.args.JsonRestore()))["info"])


def stored_leaves(manager: ocp.CheckpointManager, step: int) -> dict[str, Leaf]:
    tree = manager.item_metadata(step)["state"].tree
    return {name: (tuple(leaf.shape), jnp.dtype(leaf.dtype)) for name, leaf in tree.items()}


@functools.cache
def _silence() -> None:
    """Orbax logs every option, and errors twice; after a failure, the reads and writes that are still on their way
    complain that nobody waits for them: not on stderr."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    excepthook, unraisablehook = sys.excepthook, sys.unraisablehook

    def is_abandoned(error: Any) -> bool:
        # A coroutine that is thrown away ends with GeneratorExit, which Orbax turns into an error of its own.
        return "Event loop is closed" in str(error) or isinstance(getattr(error, "__cause__", None), GeneratorExit)

    def on_exception(kind: Any, error: Any, trace: Any) -> None:
        if not is_abandoned(error):
            excepthook(kind, error, trace)

    def on_unraisable(unraisable: Any) -> None:
        if not is_abandoned(unraisable.exc_value):
            unraisablehook(unraisable)

    def is_worth_logging(record: logging.LogRecord) -> bool:
        return "was never retrieved" not in record.getMessage()  # siblings of a write that failed and was reported

    sys.excepthook, sys.unraisablehook = on_exception, on_unraisable
    logging.getLogger("asyncio").addFilter(is_worth_logging)
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
