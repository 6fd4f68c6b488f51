"""What changes while puzzles are trained: exploration that is annealed, recursion that grows deeper by stages.

Both are functions of the step and of settings, computed inside the compiled step: a run that is resumed goes on with
them, runs that differ in them share a program, and nothing is compiled when a stage begins. The program has all cycles
of the deepest stage, and passes over those that are not wanted yet.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Discriminator, Field, PositiveInt, Tag

from tinypod.config import Config
from tinypod.errors import ConfigError
from tinypod.models import trm

CYCLES = ("H_cycles", "L_cycles")
Share = Annotated[float, Field(ge=0, le=1)]


class Linear(Config):
    """From `initial` at the first step in a line to `final` at step `steps`, and there it stays."""

    kind: Literal["linear"] = "linear"
    initial: Share
    final: Share
    steps: PositiveInt


def _form(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get("kind")
    return "linear" if isinstance(value, Linear) else "constant"


ConstantOrLinear = Annotated[Annotated[Share, Tag("constant")] | Annotated[Linear, Tag("linear")], Discriminator(_form)]


class Stage(Config):
    """Of a curriculum: the depth of the recursion in the steps before `until_step` that no earlier stage has."""

    until_step: PositiveInt
    H_cycles: PositiveInt
    L_cycles: PositiveInt


def check_order(curriculum: Sequence[Stage]) -> None:
    ends = [stage.until_step for stage in curriculum]
    if ends != sorted(set(ends)):
        raise ValueError(f"curriculum: the until_step of a stage must be later than the one before it, got {ends}")


def check_depth(curriculum: Sequence[Stage], model: trm.TrmConfig) -> None:
    for number, stage in enumerate(curriculum):
        for name in CYCLES:
            if getattr(stage, name) > getattr(model, name):
                raise ConfigError(
                    f"task.curriculum: {name}={getattr(stage, name)} of stage {number} is more than "
                    f"model.{name}={getattr(model, name)}, the depth after all stages; raise that, or lower the stage's"
                )


def describe_curriculum(curriculum: Sequence[Stage], model: trm.TrmConfig) -> tuple[str, ...]:
    if not curriculum:
        return ()
    stages = [f"H {one.H_cycles} × L {one.L_cycles} until step {one.until_step:,}" for one in curriculum]
    return (
        f"recursion grows: {', '.join(stages)}, then H {model.H_cycles} × L {model.L_cycles}; one program has all "
        "stages, and plans and evaluations are of the last",
    )


def exploration_settings(exploration: float | Linear) -> dict[str, float]:
    """A constant is annealed to itself, so that both forms are settings of one program."""
    if not isinstance(exploration, Linear):
        exploration = Linear(initial=exploration, final=exploration, steps=1)
    return {
        "exploration": exploration.initial,
        "exploration_final": exploration.final,
        "exploration_steps": float(exploration.steps),
    }


def curriculum_settings(curriculum: Sequence[Stage], model: trm.TrmConfig) -> dict[str, float]:
    if not curriculum:
        return {}
    settings = {name: float(getattr(model, name)) for name in CYCLES}
    for number, stage in enumerate(curriculum):
        settings |= {f"stage{number}_{name}": float(value) for name, value in stage}
    return settings


def make_at_step(num_stages: int) -> Callable[[dict[str, Array], Array], dict[str, Array]]:
    """(settings, step) -> settings, with the exploration and the cycles of that step; steps count from 0."""

    def at_step(varied: dict[str, Array], step: Array) -> dict[str, Array]:
        done, first, last = step.astype(jnp.float32), varied["exploration"], varied["exploration_final"]
        share = jnp.minimum(done / varied["exploration_steps"], 1.0)
        now = {"exploration": first + (last - first) * share} | {name: varied[name] for name in CYCLES if num_stages}
        for number in reversed(range(num_stages)):  # of the stages that are not over, the first
            in_stage = done < varied[f"stage{number}_until_step"]
            now |= {name: jnp.where(in_stage, varied[f"stage{number}_{name}"], now[name]) for name in CYCLES}
        return varied | now

    return at_step


def cycles_of(varied: dict[str, Array]) -> trm.Cycles:
    return trm.Cycles(*(varied[name].astype(jnp.int32) for name in CYCLES))
