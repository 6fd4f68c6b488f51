"""The schema of an experiment, and `build`, which turns a config into everything that runs it.

`train`, `eval` and `solve`, and the tests, all use this one `build`: what is checked is what runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from rich.console import Console

from tinypod import sharding, step
from tinypod.config import Config
from tinypod.data import fetch, puzzles, views
from tinypod.errors import ConfigError, DataError
from tinypod.models import trm
from tinypod.optim import Optimizer, OptimizerConfig, build_optimizer
from tinypod.runs import storage
from tinypod.tasks.puzzle import PuzzleTaskConfig, build_task
from tinypod.tasks.task import Task


class DataConfig(Config):
    path: str  # a dataset folder that `tinypod data` made; gs://… is fetched once into the user's cache folder
    train_split: str = "train"
    eval_split: str = "test"
    augmentations: NonNegativeInt | Literal["endless"] = "endless"  # fixed views of a puzzle besides itself
    # What the dataset will be: `tinypod plan` goes by it where none is at `path`, or `path` is in a bucket.
    expected: Annotated[puzzles.ExpectedSudoku | puzzles.ExpectedPlain, Field(discriminator="kind")] | None = None


class EvalConfig(Config):
    every_steps: PositiveInt | None = 1000  # null: only at the end
    batch_size: PositiveInt = 1024
    limit: PositiveInt | None = None  # the first rows only (a split is stored in random order)
    weights: Literal["ema", "live"] = "ema"


class BestConfig(Config):
    metric: Literal["eval/exact_accuracy", "eval/cell_accuracy", "eval/halt_accuracy", "eval/steps"] = (
        "eval/exact_accuracy"
    )
    mode: Literal["max", "min"] = "max"


class CheckpointConfig(Config):
    every_steps: PositiveInt | None = 1000
    every_minutes: PositiveFloat | None = 10.0
    keep_last: PositiveInt = 2
    keep_every_hours: PositiveFloat | None = None  # besides the last and the best, one of each so many hours
    best: BestConfig | None = BestConfig()


class NonFiniteConfig(Config):
    """A step whose loss or gradients are not finite changes nothing and is counted; too many in a row, and the run goes
    back to the last checkpoint before them and leaves their batches out."""

    rollback_after: PositiveInt = 10  # such steps in a row
    max_rollbacks: NonNegativeInt = 3  # in a whole run; then it ends


class WandbConfig(Config):
    """Where W&B shows a run; it chooses an `entity` and a `name` where none is given."""

    project: str
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline", "disabled"] = "online"


class LogConfig(Config):
    every_steps: PositiveInt = 50
    tensorboard: bool = True
    wandb: WandbConfig | None = None


class HealthConfig(Config):
    heartbeat_s: PositiveFloat = 5.0  # between two writes of a process's heartbeat file
    start_timeout_s: PositiveFloat = 300.0  # until all processes are there; also a wait for data without a beat
    restore_timeout_s: PositiveFloat = 900.0  # to read a checkpoint
    compile_timeout_s: PositiveFloat = 1800.0  # to compile, or to load what was compiled before
    step_timeout_s: PositiveFloat = 300.0  # for one step
    evaluate_timeout_s: PositiveFloat = 900.0  # for one batch of an evaluation
    save_timeout_s: PositiveFloat = 900.0  # to save a checkpoint, and to end
    close_timeout_s: PositiveFloat = 1800.0  # to close metrics and checkpoints at the end; W&B may upload for minutes
    on_recompile: Literal["stop", "warn"] = "stop"  # when a function is compiled again after warm-up
    replica_check_every_steps: PositiveInt | None = None  # compare the copies of the weights; null: never

    @model_validator(mode="after")
    def _beats_often_enough(self) -> "HealthConfig":
        timeouts = [key for key in type(self).model_fields if key.endswith("_timeout_s")]
        key = min(timeouts, key=lambda key: float(getattr(self, key)))
        if 4 * self.heartbeat_s > getattr(self, key):  # else a silent process could not be told from a live one
            raise ValueError(
                f"heartbeat_s={self.heartbeat_s} must be at most a quarter of the shortest timeout, "
                f"{key}={getattr(self, key)}"
            )
        return self


class ExperimentConfig(Config):
    seed: NonNegativeInt = 0
    steps: PositiveInt
    batch_size: PositiveInt
    accumulation: PositiveInt = 1  # parts that a batch is computed in, one after the other
    mesh: sharding.MeshConfig = sharding.MeshConfig()
    compile_cache: str | None = "auto"  # a folder or gs:// URL; auto: in the user's cache folder; null: none
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = 0.999
    data: DataConfig
    model: trm.TrmConfig
    task: PuzzleTaskConfig = PuzzleTaskConfig()
    optimizer: OptimizerConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    nonfinite: NonFiniteConfig = NonFiniteConfig()
    log: LogConfig = LogConfig()
    health: HealthConfig = HealthConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> "ExperimentConfig":
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide into accumulation={self.accumulation} parts"
            )
        if self.eval.weights == "ema" and self.ema_decay is None:
            raise ValueError("eval.weights=ema needs ema_decay; set it, or eval.weights=live")
        if self.seed >= 2**31:
            raise ValueError(f"seed={self.seed} must be below 2**31")
        return self


@dataclass(frozen=True)
class Experiment:
    """A config made runnable. `init` and `train_step` are compiled with explicit shardings, once."""

    config: ExperimentConfig
    dataset: Path  # where its files are on this host
    info: puzzles.DatasetInfo
    shape: trm.PuzzleShape
    mesh: Mesh
    task: Task
    optimizer: Optimizer
    gather: sharding.Gather | None  # makes weights split over `fsdp` whole where they are used
    specs: Any  # of the parameters
    state_shardings: Any
    init: Callable[[], step.TrainState]
    train_step: Callable[[step.TrainState, Any], tuple[step.TrainState, dict[str, jax.Array]]]

    @cached_property
    def abstract_state(self) -> step.TrainState:
        """Shapes, dtypes and shardings of the state; nothing is computed."""
        shapes = jax.eval_shape(self.init)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.state_shardings
        )

    @cached_property
    def abstract_source(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of what `put_source` makes, of a dataset that may not be there."""
        name, whole = self.config.data.train_split, sharding.replicated(self.mesh)
        if name not in self.info.splits:
            raise DataError(f"{self.dataset} has no split {name!r}; it has {', '.join(self.info.splits)}")
        rows = self.info.splits[name].rows
        shapes: dict[str, Any] = {
            "inputs": ((rows, self.info.seq_len), np.uint8),
            "labels": ((rows, self.info.seq_len), np.uint8),
            "identifiers": ((rows,), np.int32),
            step.SKIPPED: ((self.config.nonfinite.max_rollbacks, 2), np.int32),
        }
        if self.info.grouped:
            split = self.read_split(name)
            shapes |= {key: (x.shape, x.dtype) for key, x in views.device_arrays(split).items()}
        return {key: jax.ShapeDtypeStruct(*value, sharding=whole) for key, value in shapes.items()}

    def check_batch(self) -> None:
        """Training only: evaluation fills its batches up."""
        rows = self.config.batch_size // self.config.accumulation
        sharding.check_divides(self.mesh, rows, "batch_size / accumulation")

    def read_split(self, name: str) -> puzzles.Split:
        return puzzles.read_split(self.dataset, self.info, name)

    def put_source(self, split: puzzles.Split, skipped: list[tuple[int, int]] | None = None) -> dict[str, jax.Array]:
        """The training puzzles on every device, and which batches to leave out (first number and count)."""
        pairs = sorted(skipped or [])
        ranges = np.zeros((max(self.config.nonfinite.max_rollbacks, len(pairs)), 2), np.int32)  # one shape for all
        ranges[: len(pairs)] = np.asarray(pairs, np.int32).reshape(-1, 2)
        return sharding.put(views.device_arrays(split) | {step.SKIPPED: ranges}, sharding.replicated(self.mesh))


def build(
    config: ExperimentConfig,
    devices: Sequence[Any] | None = None,
    console: Console | None = None,
    data: "DataFound | None" = None,
) -> Experiment:
    """Reads the dataset's description, not its arrays; not even that where `data` is given."""
    dataset, info = data or read_data(config, console)
    shape = trm.PuzzleShape(info.seq_len, info.vocab_size, info.num_identifiers)
    mesh = sharding.make_mesh(config.mesh, devices)
    params = jax.eval_shape(lambda: trm.init(config.model, shape, jax.random.key(0)))
    specs = sharding.param_specs(trm.sharding_rules(config.model), params, mesh)
    gather = sharding.make_gather(mesh, specs)
    task = build_task(config.task, config.model, shape, config.batch_size, make_source(config, info), gather)
    optimizer = build_optimizer(config.optimizer, config.batch_size, config.steps)

    init = step.make_init(task, optimizer, config.seed, ema=config.ema_decay is not None)
    train_step = step.make_train_step(
        task, optimizer, config.seed, config.batch_size, config.accumulation, config.ema_decay, mesh
    )
    whole, rows = sharding.replicated(mesh), sharding.by_rows(mesh)
    shapes = jax.eval_shape(init)
    shardings = shapes._replace(
        step=whole,
        params=sharding.named(mesh, specs),
        opt_state=sharding.named(mesh, sharding.specs_like(specs, shapes.opt_state)),
        ema=sharding.named(mesh, sharding.specs_like(specs, shapes.ema)),
        carry=jax.tree.map(lambda _: rows, shapes.carry),
    )
    return Experiment(
        config=config,
        dataset=dataset,
        info=info,
        shape=shape,
        mesh=mesh,
        task=task,
        optimizer=optimizer,
        gather=gather,
        specs=specs,
        state_shardings=shardings,
        init=jax.jit(init, out_shardings=shardings),
        train_step=jax.jit(
            train_step, donate_argnums=0, in_shardings=(shardings, whole), out_shardings=(shardings, whole)
        ),
    )


class DataFound(NamedTuple):
    folder: Path  # on this host; empty where only a description is there
    info: puzzles.DatasetInfo


def read_data(config: ExperimentConfig, console: Console | None = None) -> DataFound:
    folder = fetch.local_dataset(config.data.path, console)
    return DataFound(folder, puzzles.read_info(folder))


def describe_data(config: ExperimentConfig) -> DataFound:
    """What the dataset at `data.path` says of itself; where there is none here, what `data.expected` says of it."""
    expected, path = config.data.expected, config.data.path
    if expected is not None and (storage.is_remote(path) or not (Path(path) / "dataset.json").exists()):
        return DataFound(Path(path), expected.info(config.data.train_split))
    try:
        return read_data(config)
    except DataError as error:
        raise DataError(
            f"{error}; or say what it will be, to plan without it: 'data.expected={{kind: sudoku, rows: 1000}}'"
        ) from None


def make_source(config: ExperimentConfig, info: puzzles.DatasetInfo) -> views.Source:
    """How training examples are drawn from this dataset."""
    endless = config.data.augmentations == "endless"
    view = None
    if info.kind == "sudoku":
        assert info.box is not None
        view = views.sudoku_view((info.box[0], info.box[1]), info.vocab_size)
    elif config.data.augmentations not in ("endless", 0):
        raise ConfigError(
            f"data.augmentations={config.data.augmentations}: the puzzles in {config.data.path} are of kind "
            f"{info.kind!r}, whose symmetries are not known; leave it out"
        )
    augmentations = None if endless else int(config.data.augmentations)
    return views.Source(view, augmentations, config.seed, grouped=info.grouped)
