"""What would fit, and what would be fast or cheap enough: searches that compile as little as they can.

To make a config fit, a batch is cut into more parts (`accumulation`), activations are computed again in the backward
pass (`model.remat`), and, where the state alone is too large, weights are split over more devices (`mesh.fsdp`). Of the
variants that fit with as little splitting as possible the fastest by prediction is proposed. A compilation that runs
out of memory is refused early and says by how much, which says where to look next.

To rank slices, one of each generation is compiled, the others are scaled from it by the rows a device has, and the best
of those are compiled in turn.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tinypod import slices
from tinypod.analysis import Analysis
from tinypod.errors import ConfigError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.plan import Plan, Planner, check

MAX_DEVICES = 256  # of slices that are ranked unasked
CONFIRMED = 3  # ranked slices that are compiled, from the best on
_HEADROOM = 0.98  # of the memory, where a guess aims at


class Candidate(Protocol):
    """A plan of some variant of a config, for a slice or for the device at hand."""

    @property
    def fits(self) -> bool: ...
    @property
    def step_s(self) -> float | None: ...
    @property
    def devices(self) -> int: ...
    @property
    def usable_bytes(self) -> int: ...
    @property
    def analysis(self) -> Analysis: ...


C = TypeVar("C", bound=Candidate)
Attempt = Callable[[tuple[str, ...]], C]  # the plan of the config with these overrides


def find_fit(config: ExperimentConfig, failed: C, attempt: Attempt[C]) -> C | None:
    """The fastest variant found that fits; None if there is none."""
    for fsdp in _fsdp_sizes(failed):
        found = [
            plan
            for remat in ([True] if config.model.remat else [False, True])
            if (plan := _smallest_accumulation(config, fsdp, remat, failed, attempt)) is not None
        ]
        if found:
            return min(found, key=lambda plan: math.inf if plan.step_s is None else plan.step_s)
    return None


def _fsdp_sizes(failed: Candidate) -> Iterator[int]:
    """From the config's own on, doubling; sizes at which the state could not fit are left out."""
    mesh, memory = failed.analysis.mesh, failed.analysis.memory
    split = memory.weights + memory.optimizer + memory.averages
    size = mesh["fsdp"]
    while size * mesh["tensor"] <= failed.devices:
        if memory.state - split + split * mesh["fsdp"] / size < failed.usable_bytes:
            yield size
        size *= 2


def _smallest_accumulation(
    config: ExperimentConfig, fsdp: int, remat: bool, failed: C, attempt: Attempt[C]
) -> C | None:
    parts, memory = config.accumulation, failed.analysis.memory
    if fsdp == failed.analysis.mesh["fsdp"] and remat == config.model.remat:
        parts = max(2 * parts, _first_guess(parts, memory.needed, memory.state, failed.usable_bytes))
    while True:
        try:
            plan = attempt(_as_overrides(config, parts, remat, fsdp))
        except ConfigError:
            return None  # fewer rows than devices, or weights that do not divide
        if plan.fits:
            return plan
        memory = plan.analysis.memory
        if memory.state >= plan.usable_bytes:
            return None
        parts = max(2 * parts, _first_guess(parts, memory.needed, memory.state, plan.usable_bytes))


def _first_guess(parts: int, needed: int, state: int, usable: int) -> int:
    """Parts, a power of two times as many, at which what grows with the rows would fit."""
    room = _HEADROOM * usable - state
    if room <= 0:
        return parts
    return parts * 2 ** max(0, math.ceil(math.log2(max(1.0, (needed - state) / room))))


def _as_overrides(config: ExperimentConfig, parts: int, remat: bool, fsdp: int) -> tuple[str, ...]:
    settings = {
        "mesh.fsdp": (fsdp, config.mesh.fsdp),
        "model.remat": (remat, config.model.remat),
        "accumulation": (parts, config.accumulation),
    }
    written = [f"{key}={str(value).lower()}" for key, (value, now) in settings.items() if value != now]
    if fsdp != config.mesh.fsdp and config.mesh.data != -1:
        written.append("mesh.data=-1")
    return tuple(written)


@dataclass(frozen=True)
class Ranked:
    """A slice in a ranking: `plan` where it was compiled, else scaled from another slice's plan."""

    slice: slices.Slice
    hours: float
    dollars: float | None
    dollars_spot: float | None
    plan: Plan | None
    scaled_from: str | None

    def as_json(self) -> dict[str, Any]:
        return {
            "slice": self.slice.name,
            "chips": self.slice.chips,
            "hours": self.hours,
            "dollars": self.dollars,
            "dollars_spot": self.dollars_spot,
            "overrides": list(self.plan.overrides) if self.plan else [],
            "scaled_from": self.scaled_from,
        }


def rank(
    planner: Planner,
    targets: Sequence[slices.Slice] | None,
    *,
    max_hours: float | None,
    max_dollars: float | None,
    spot: bool,
) -> list[Ranked]:
    """Slices that keep within the budget, the best first: the cheapest within a time, the fastest for a sum."""
    named = targets is not None
    candidates = _usable(planner.config, targets if targets is not None else slices.all_slices(), named)
    if not candidates:
        raise UserError(
            f"batch_size={planner.config.batch_size} divides over no slice that was considered; `tinypod slices` lists "
            "them, --slice names one"
        )
    ranked = [entry for entry in _estimate(planner, candidates, compile_all=named) if entry is not None]

    def within(entry: Ranked) -> bool:
        cost = entry.dollars_spot if spot else entry.dollars
        in_time = max_hours is None or entry.hours <= max_hours
        return in_time and (max_dollars is None or (cost is not None and cost <= max_dollars))

    def worth(entry: Ranked) -> tuple[float, float]:
        cost = entry.dollars_spot if spot else entry.dollars
        dear = math.inf if cost is None else cost
        return (entry.hours, dear) if max_hours is None else (dear, entry.hours)

    for _ in range(CONFIRMED * 2):  # a slice that was confirmed may fall back, and another come up
        ranked.sort(key=worth)
        top = [entry for entry in ranked if within(entry)][:CONFIRMED]
        unsure = next((entry for entry in top if entry.plan is None), None)
        if unsure is None:
            break
        ranked.remove(unsure)
        confirmed = _confirmed(planner, unsure.slice)
        if confirmed is not None:
            ranked.append(confirmed)
    ranked.sort(key=worth)
    return [entry for entry in ranked if within(entry)]


def _usable(config: ExperimentConfig, targets: Sequence[slices.Slice], named: bool) -> list[slices.Slice]:
    usable = []
    for target in targets:
        try:
            check(config, target)
        except ConfigError:
            if named:
                raise
            continue
        if named or target.devices <= MAX_DEVICES:
            usable.append(target)
    return usable


def _estimate(planner: Planner, candidates: Sequence[slices.Slice], *, compile_all: bool) -> Iterator[Ranked | None]:
    for generation in dict.fromkeys(target.generation for target in candidates):
        family = sorted((t for t in candidates if t.generation is generation), key=lambda target: target.devices)
        if compile_all:
            yield from (_confirmed(planner, target) for target in family)
            continue
        reference = next((found for target in family if (found := _confirmed(planner, target))), None)
        if reference is None:
            continue
        yield reference
        yield from (_scaled(reference, target) for target in family if target.devices > reference.slice.devices)


def _confirmed(planner: Planner, target: slices.Slice) -> Ranked | None:
    plan = planner.plan(target)
    if not plan.fits:
        found = find_fit(planner.config, plan, lambda overrides: planner.plan(target, overrides))
        if found is None:
            return None
        plan = found
    assert plan.hours is not None
    return Ranked(target, plan.hours, plan.dollars, plan.dollars_spot, plan, None)


def _scaled(reference: Ranked, target: slices.Slice) -> Ranked:
    """As if the time on a chip went with its rows, and the exchange between chips took as long as before."""
    plan = reference.plan
    assert plan is not None
    assert plan.prediction is not None
    share = reference.slice.devices / target.devices
    exchange = plan.prediction.interconnect_s or 0.0
    step_s = plan.prediction.on_chip_s * share + exchange
    ratio = step_s / plan.prediction.step_s
    cost = ratio / share

    def times(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    return Ranked(
        target,
        reference.hours * ratio,
        times(reference.dollars, cost),
        times(reference.dollars_spot, cost),
        None,
        reference.slice.name,
    )
