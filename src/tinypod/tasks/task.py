"""What a task is: all that the step, the loop, the planner and the reports ask of a job.

Training puzzles and distilling language models differ only in the `Task` that their config builds. A task kind brings
its own config sections (`TaskKind`); `tinypod.tasks` lists the kinds.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from rich.console import Console

from tinypod.config import Config
from tinypod.optim import Matrices
from tinypod.runs.headline import Metric
from tinypod.sharding import Placement, Rules, path_of

Tree = Any  # a nested dict of arrays


class Draw(NamedTuple):
    """Where a batch's randomness comes from."""

    number: Array  # int32: the batch's number, from the host
    key: Array  # of this batch
    run_key: Array  # of the run: for what is drawn once and looked up again, such as the fixed views of a puzzle


class Feed(Protocol):
    """What the step is given for the batch of a number: device arrays, of the same shapes for every number."""

    def __call__(self, number: int) -> Tree: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """A pass over a split. `score` is compiled once; the last batch is padded with rows whose `count` is 0."""

    rows: int
    read: Callable[[int, int], dict[str, np.ndarray]]  # rows from start to stop, as host arrays with the rows first
    score: Callable[[Tree, dict[str, Array]], dict[str, Array]]  # (params, batch with `count` [B]) -> sums
    summarise: Callable[[Mapping[str, np.ndarray]], dict[str, float]]  # sums over all batches -> metrics
    copies: int = 1  # rows that `score` computes for each row of a batch: batches have as many times fewer


@dataclass(frozen=True)
class Task:
    """A job as functions. Those of the first group are pure and run inside the compiled step.

    `draw` makes the global batch of a step, every leaf with the batch's rows first, from what the feed gave. `begin`
    lets it into the carry. `loss` returns the *sum* over rows, so that accumulating over parts of a batch is adding,
    and sums for metrics, among them `weight`: what the loss is divided by (rows, or unmasked tokens).
    `varied` are the task's settings that runs of one program may vary; `draw` and `loss` are given them as arrays, as
    `at_step` makes them for the step: what changes during a run is computed from settings and step, and compiles
    nothing. Among the sums, `flops` are the matrix products of these rows, where steps differ in them.

    `prepare` makes of the parameters what the other functions are given: what is computed from weights alone, once a
    step, however many parts the batch is computed in. Leaves that it replaces are gone from its result.
    """

    init_params: Callable[[Array], Tree]  # key -> nested dict
    prepare: Callable[[Tree], Tree]  # params -> prepared params
    lower: Callable[[Tree], Tree]  # prepared params in the dtypes that they are computed in, otherwise the same
    init_carry: Callable[[Tree], Tree]  # params -> carry of a whole batch
    draw: Callable[[Tree, Draw, Tree], Tree]  # (feed, draw, varied) -> batch
    begin: Callable[[Tree, Tree, Tree], Tree]  # (params, carry, batch) -> carry
    lookup: Callable[[Tree], dict[str, Array]]  # carry -> row ids for each table
    loss: Callable[..., Any]  # (params, table rows, carry, batch, varied) -> loss, (carry, sums)

    rules: Rules  # how parameters are sharded
    prepared_rules: Rules  # and those that `prepare` returns
    varied: Mapping[str, float]
    frozen: tuple[str, ...]  # patterns of parameter paths that are never updated
    tables: tuple[str, ...]  # top-level parameters that are updated only in the rows that a batch looks up
    scaled: tuple[tuple[str, str], ...]  # patterns of paths, and which of `varied` their updates are multiplied by

    abstract_feed: Callable[
        [Mesh | AbstractMesh], Tree
    ]  # shapes, dtypes and shardings of what the feed gives, without reading data
    open_feed: Callable[[Mesh], Feed]  # reads the training data
    open_evaluation: Callable[[str | None], Evaluation]  # of a split; None: the config's
    fingerprint: Mapping[str, str]  # of the data: a hash for each part

    summarise: Callable[[Mapping[str, float]], dict[str, float]]  # sums over steps -> metrics, on the host
    headline: tuple[Metric, ...]  # the first one decides which checkpoint is the best, unless the config says
    unit: str  # of a row: "puzzles", "blocks"
    description: str  # of model and data, in a few words
    train_rows: int
    held_out_rows: int | None  # None: not known
    # Matrix products of one row: of a training step (True), the most expensive one; of an evaluation (False).
    flops: Callable[[bool], int]

    at_step: Callable[[dict[str, Array], Array], dict[str, Array]] = lambda varied, step: varied
    matrices: Matrices = ()  # of the trained parameters, for Muon
    notes: tuple[str, ...] = ()  # what the start of a run and its plans say besides
    dataset: Mapping[str, Any] | None = None  # what the data say about themselves, as JSON: for `TaskKind.recall`


class TaskKind(NamedTuple):
    """A kind of task: its sections of the config, each with its own `kind`, and how it is built. The data's have a
    `path`; the model's have a `dtype`, and `remat` where activations can be computed again in the backward pass.

    `open(config, planned, console)` reads what the data say about themselves; with `planned`, the data need not be
    there if the config describes them. `build(config, opened, placement)` does no work. `recall(config, dataset)` is
    `open` from what a run remembers of its data (`Task.dataset`): enough for a trained model, without the data.
    """

    task: type[Config]
    data: type[Config]
    model: type[Config]
    open: Callable[[Any, bool, Console | None], Any]
    build: Callable[[Any, Any, Placement], Task]
    changeable: tuple[str, ...]  # patterns of config keys that later steps of a run may be trained with
    varied: tuple[str, ...]  # of those that are in `Task.varied`: one program serves runs that differ in them
    resident: bool  # the feed is the same for every run of a dataset: runs can be packed
    recall: Callable[[Any, Any], Any] | None = None  # None: a run always needs its data


def root_key(seed: Array | int, purpose: Literal["weights", "batches", "views"]) -> Array:
    """Each purpose has its own root: `split(key)[i]` is `fold_in(key, i)`, so that keys of one root may coincide."""
    return jax.random.fold_in(jax.random.key(seed), ("weights", "batches", "views").index(purpose))


def select(params: Tree, wanted: Callable[[str], bool]) -> Tree:
    """The leaves of a nested dict whose dotted path is wanted, in a nested dict without the others."""

    def walk(tree: Tree, prefix: tuple[Any, ...]) -> Tree:
        if not isinstance(tree, dict):
            return tree if wanted(path_of(prefix)) else None
        kept = {name: walk(value, (*prefix, jax.tree_util.DictKey(name))) for name, value in tree.items()}
        return {name: value for name, value in kept.items() if value is not None} or None

    return walk(params, ()) or {}


def is_trained(task: Task, path: str) -> bool:
    return path.split(".")[0] not in task.tables and not any(re.fullmatch(pattern, path) for pattern in task.frozen)


def merge(base: Tree, over: Tree) -> Tree:
    """Two nested dicts as one, the second winning."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {name: merge(base[name], value) if name in base else value for name, value in over.items()}
