"""The kinds of task. Each is one module with a `KIND`; a config names it by `task.kind`.

Modules named in TINYPOD_TASKS (comma-separated, importable) add kinds of their own: no fork is needed to train another
task with the same loop, checkpoints, meshes and plans.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from tinypod.config import Config
from tinypod.errors import ConfigError
from tinypod.tasks.task import TaskKind

MODULES = ("tinypod.tasks.puzzle", "tinypod.tasks.distill")


def _read_kinds() -> dict[str, TaskKind]:
    named = filter(None, os.environ.get("TINYPOD_TASKS", "").split(","))
    kinds = {}
    for name in (*MODULES, *named):
        try:
            kind: TaskKind = import_module(name).KIND
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"TINYPOD_TASKS: {name} is no module with a task's KIND: {error}") from error
        kinds[kind.task.model_fields["kind"].default] = kind
    return kinds


def _union(*classes: type[Config]) -> Any:
    distinct = tuple(dict.fromkeys(classes))
    return distinct[0] if len(distinct) == 1 else Annotated[Union[distinct], Field(discriminator="kind")]  # noqa: UP007


KINDS = _read_kinds()
if TYPE_CHECKING:
    TaskConfig = Any
    DataConfig = Any
    ModelConfig = Any
else:
    TaskConfig = _union(*(kind.task for kind in KINDS.values()))
    DataConfig = _union(*(kind.data for kind in KINDS.values()))
    ModelConfig = _union(*(kind.model for kind in KINDS.values()))
