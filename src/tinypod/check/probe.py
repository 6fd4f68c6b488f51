"""What the pre-flight checks share: the experiment, the compiled step, the state; and how they answer.

A check returns what it found, or raises: Failed (or any error that is meant for a user) for a property that does not
hold, Skipped for one that cannot be tried here.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from tinypod import sharding
from tinypod.cluster.agreement import Cluster
from tinypod.errors import UserError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.step import TrainState
from tinypod.tasks.task import Feed


@dataclass(frozen=True)
class Found:
    """What a check that passed has to say; `same` must be equal in all processes."""

    text: str
    figures: dict[str, float] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)


class Failed(UserError):
    """The property does not hold."""


class Skipped(Exception):
    """It cannot be tried here."""


@dataclass
class Probe:
    """What the checks share; each fills in what it builds."""

    config: ExperimentConfig | UserError  # the error, if it could not be loaded
    cluster: Cluster = field(default_factory=Cluster)
    steps: int = 20
    scratch: str = ""  # a folder of our own, local or gs://, which exists or can be made
    console: Console = field(default_factory=lambda: Console(quiet=True))
    # Filled in by `check_data` and `check_step`.
    experiment: Experiment = field(init=False)
    feed: Feed = field(init=False)
    compiled: Any = field(init=False)
    compile_s: float = field(init=False)
    state: TrainState = field(init=False)
    losses: list[float] = field(init=False)
    grad_norms: list[float] = field(init=False)
    step_s: list[float] = field(default_factory=list)

    def needs_devices(self, what: str) -> None:
        if self.experiment.mesh.size == 1:
            raise Skipped(f"one device: {what}")

    def alone(self) -> Experiment:
        """The same experiment on one device of this process."""
        one = sharding.MeshConfig(data=1, fsdp=1, tensor=1)
        return build(self.experiment.config.model_copy(update={"mesh": one}), [jax.local_devices()[0]])

    def gather(self, values: np.ndarray) -> np.ndarray:
        """The same array of every process: [processes, ...]."""
        if self.cluster.count == 1:
            return values[None]
        return np.asarray(multihost_utils.process_allgather(values))


def take_steps(
    experiment: Experiment, compiled: Any, state: TrainState, feed: Feed, steps: int
) -> tuple[TrainState, list[Any]]:
    sums, settings = [], experiment.put_settings()
    for number in range(steps):
        state, one = compiled(state, settings, experiment.put(np.int32(number)), feed(number))
        sums.append(one)
    return state, jax.device_get(sums)


def losses_of(experiment: Experiment, sums: list[Any]) -> list[float]:
    for number, part in enumerate(sums):
        if part["skipped"]:
            raise Failed(
                f"loss or gradients are not finite at step {number + 1}; lower optimizer.learning_rate, set "
                "optimizer.clip_norm=1.0, or use model.dtype=float32"
            )
    return [experiment.task.summarise({name: float(x) for name, x in part.items()})["loss"] for part in sums]
