"""Runs of one shape in one program.

The state of a pack has a leading dimension for its runs, which are dealt out over a mesh with the one axis `run`. Each
device maps the step over its own runs; nothing is exchanged between devices. What the runs differ in are settings,
which are arguments of the step: there is one program, compiled once.

`Program` is what a pack computes; `packing.py` says which runs make one, `packed.py` trains it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinypod import sharding, step
from tinypod.evaluate import Pass, Progress
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.optim import build_optimizer
from tinypod.step import TrainState
from tinypod.tasks import KINDS
from tinypod.tasks.task import Evaluation

RUN = "run"  # the mesh axis


class Program:
    """The step of many runs, and what goes with it. `lanes` are the runs and, where they do not divide over the
    devices, copies of the last one, which nobody looks at."""

    def __init__(self, configs: Sequence[ExperimentConfig], devices: Sequence[Any] | None = None) -> None:
        devices = list(sharding.all_devices() if devices is None else devices)
        each = -(-len(configs) // len(devices))
        used = devices[: -(-len(configs) // each)]
        self.mesh = Mesh(np.asarray(used), (RUN,))
        self.num_runs, self.num_lanes = len(configs), each * len(used)
        alone = sharding.MeshConfig(devices=1)
        first = configs[0].model_copy(update={"mesh": alone})
        self.experiment = build(first, used[:1])
        self.experiments = _experiments(self.experiment, configs)
        task, config = self.experiment.task, self.experiment.config
        optimizer, ema = self.experiment.optimizer, config.ema_decay is not None
        lanes = [one.settings for one in self.experiments]
        lanes += [lanes[-1]] * (self.num_lanes - self.num_runs)
        self.by_run, self.whole = NamedSharding(self.mesh, PartitionSpec(RUN)), sharding.replicated(self.mesh)
        self.settings = jax.tree.map(lambda *values: np.stack(values), *lanes)
        one_step = step.make_train_step(task, optimizer, config.accumulation, ema, self.experiment.mesh)
        self._init = self.over_runs(step.make_init(task, optimizer, ema), shared=0)
        self._step = self.over_runs(one_step, shared=2, donate_argnums=0, args=2)
        self._take = jax.jit(
            lambda tree, i: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree),
            out_shardings=self.whole,
        )

    def over_runs(self, function: Any, *, args: int = 1, shared: int, donate_argnums: int | tuple[()] = ()) -> Any:
        """A function of one run as one of many: `args` arguments that each run has its own of, then shared ones."""
        many = jax.vmap(function, in_axes=(0,) * args + (None,) * shared)
        runs, whole = PartitionSpec(RUN), PartitionSpec()
        mapped = jax.shard_map(
            many, mesh=self.mesh, in_specs=(runs,) * args + (whole,) * shared, out_specs=runs, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate_argnums)

    def put_settings(self) -> step.Settings:
        return sharding.put(self.settings, self.by_run)

    def init(self) -> TrainState:
        return self._init(self.put_settings())

    def stack(self, states: Sequence[TrainState]) -> TrainState:
        """States of the runs, one of each, as the pack's."""
        states = [*states, *[states[-1]] * (self.num_lanes - self.num_runs)]
        return sharding.put(jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *states), self.by_run)

    def take(self, tree: Any, run: int) -> Any:
        """One run's part, on every device."""
        return self._take(tree, self.put(np.int32(run)))

    def put(self, tree: Any) -> Any:
        return sharding.put(tree, self.whole)

    def compile(self, fed: Any) -> Any:
        """The step `(state, settings, number, feed) -> (state, sums)`."""
        state = self._abstract(jax.eval_shape(self._init, self.settings))
        settings = self._abstract(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.settings))
        number = jax.ShapeDtypeStruct((), np.int32, sharding=self.whole)
        return self._step.lower(state, settings, number, fed).compile()

    def _abstract(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.by_run), tree)


def _experiments(first: Experiment, configs: Sequence[ExperimentConfig]) -> list[Experiment]:
    """One of each run, with its own config and settings; the functions are the first one's."""
    kind = KINDS[first.config.task.kind]
    opened = kind.open(first.config, False, None)
    found = []
    for config in configs:
        task = kind.build(config, opened, sharding.ANYWHERE)
        optimizer = build_optimizer(config.optimizer, config.batch_size, config.steps)
        settings = step.make_settings(task, optimizer, config.seed, config.ema_decay)
        assert settings.optimizer.keys() == first.settings.optimizer.keys(), "runs of different shapes"
        found.append(dataclasses.replace(first, config=config, settings=settings))
    return found


class PackEvaluator(Pass):
    """Scores the parameters of all runs on one split."""

    def __init__(self, evaluation: Evaluation, program: Program, batch_size: int, limit: int | None) -> None:
        self._num_runs = program.num_runs
        super().__init__(evaluation, program.over_runs(evaluation.score, shared=1), program.put, batch_size, limit)

    def __call__(self, params: Any, progress: Progress | None = None) -> list[dict[str, float]]:
        sums = self.sums(params, progress)
        return [self.summarise({name: x[run] for name, x in sums.items()}) for run in range(self._num_runs)]
