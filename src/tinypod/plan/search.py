"""What would fit, and what would be fast or cheap enough: searches that compile as little as they can.

To make a config fit, a batch is cut into more parts (`accumulation`), activations are computed again in the backward
pass (`model.remat`), and, where the state alone is too large, weights are split over more devices (`mesh.fsdp`). Of the
variants that fit with the smallest `mesh.fsdp`, the one with the shortest predicted step is proposed. A variant that
does not fit says how much memory it needs, and from that follows which one to try next.

To rank slices, one of each generation is compiled, the others are scaled from it by the rows a device has, and the best
of those are compiled in turn.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tinypod.errors import ConfigError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.plan import slices
from tinypod.plan.analysis import Analysis
from tinypod.plan.planner import Plan, Planner, check

MAX_DEVICES = 256  # of slices that are ranked unasked
CONFIRMED = 3  # ranked slices that are compiled, from the best on
_HEADROOM = 0.98  # of the memory, that the next variant to try should need at most

logger = logging.getLogger(__name__)


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
            for remat in _remat_choices(config)
            if (plan := _smallest_accumulation(config, fsdp, remat, failed, attempt)) is not None
        ]
        if found:
            return min(found, key=lambda plan: math.inf if plan.step_s is None else plan.step_s)
    return None


def _remat(config: ExperimentConfig) -> bool:
    return getattr(config.model, "remat", False)


def _remat_choices(config: ExperimentConfig) -> list[bool]:
    """The config's own, and True where it could be; a model without the key has one choice."""
    return [_remat(config)] if _remat(config) or not hasattr(config.model, "remat") else [False, True]


def _fsdp_sizes(failed: Candidate) -> Iterator[int]:
    """The config's own, then twice that and so on; without those at which the state alone would not fit."""
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
    """The plan that fits with the batch in as few parts as possible; None if none does."""
    rows = config.batch_size // (failed.devices // failed.analysis.mesh["tensor"])  # a device's share of a batch
    parts = config.accumulation
    same = fsdp == failed.analysis.mesh["fsdp"] and remat == _remat(config)
    tried: list[tuple[int, C]] = [(parts, failed)] if same else []  # numbers of parts that did not fit
    while True:
        if tried:
            least = _next_parts(tried)
            counts = [] if least is None else [count for count in range(least, rows + 1) if rows % count == 0]
            if not counts:
                return None
            parts = counts[0]
        overrides = _as_overrides(config, parts, remat, fsdp, failed.analysis.mesh["fsdp"])
        try:
            plan = attempt(overrides)
        except ConfigError:
            return None  # this number of devices does not divide the weights
        except UserError as error:
            logger.warning("%s was left out: %s", " ".join(overrides), error)
            return None
        if plan.fits:
            return plan
        tried.append((parts, plan))


def _next_parts(tried: Sequence[tuple[int, Candidate]]) -> int | None:
    """The smallest number of parts that may fit; None if no number can.

    Memory is taken to be `fixed + per_batch / parts`. The fixed share is at least the state; from two plans that did
    not fit follows what else does not shrink with the parts (gradients, copies of weights).
    """
    parts, plan = tried[-1]
    memory, room = plan.analysis.memory, _HEADROOM * plan.usable_bytes
    if memory.needed <= room:  # and yet it did not fit: how much it needs is not known
        return 2 * parts
    fixed = float(memory.state)
    if len(tried) > 1:
        fewer, before = tried[-2]
        per_batch = (before.analysis.memory.needed - memory.needed) / (1 / fewer - 1 / parts)
        fixed = max(fixed, memory.needed - per_batch / parts)
    return None if fixed >= room else max(parts + 1, math.ceil(parts * (memory.needed - fixed) / (room - fixed)))


def _as_overrides(config: ExperimentConfig, parts: int, remat: bool, fsdp: int, fsdp_now: int) -> tuple[str, ...]:
    settings = {
        "mesh.fsdp": (fsdp, fsdp_now),
        "model.remat": (remat, _remat(config)),
        "accumulation": (parts, config.accumulation),
    }
    written = [f"{key}={str(value).lower()}" for key, (value, now) in settings.items() if value != now]
    if fsdp != fsdp_now and config.mesh.data != -1:
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


@dataclass(frozen=True)
class Ranking:
    entries: list[Ranked]  # the best first
    left_out: list[str]  # why, by slice


def rank(
    planner: Planner,
    targets: Sequence[slices.Slice] | None,
    *,
    max_hours: float | None,
    max_dollars: float | None,
    spot: bool,
) -> Ranking:
    """Slices that keep within the budget: the cheapest first within a time, the fastest first for a sum."""
    named = targets is not None
    candidates = _usable(planner.config, targets if targets is not None else slices.all_slices(), named)
    if not candidates:
        raise UserError(
            f"batch_size={planner.config.batch_size} divides over no slice that was considered; `tinypod slices` lists "
            "them, --slice names one"
        )
    left_out: dict[str, str] = {}
    confirmed = _references(planner, candidates, left_out, compile_all=named)

    def price(entry: Ranked) -> float | None:
        return entry.dollars_spot if spot else entry.dollars

    def refusal(entry: Ranked) -> str | None:
        if max_hours is not None and entry.hours > max_hours:
            return f"takes {entry.hours:,.1f} h"
        cost = price(entry)
        if max_dollars is not None and cost is None:
            return "its price is not known"
        return f"costs ${cost:,.0f}" if max_dollars is not None and cost is not None and cost > max_dollars else None

    def worth(entry: Ranked) -> tuple[float, float]:
        cost = price(entry)
        dear = math.inf if cost is None else cost
        return (entry.hours, dear) if max_hours is None else (dear, entry.hours)

    while True:  # each turn compiles one slice, or ends
        family = [target for target in candidates if target.name not in left_out]
        entries = sorted(
            (_entry(target, confirmed) for target in family if _references_of(target, confirmed)), key=worth
        )
        within = [entry for entry in entries if refusal(entry) is None]
        unsure = next((entry for entry in within[:CONFIRMED] if entry.plan is None), None)
        if unsure is None:
            reasons = [(entry.slice.name, refusal(entry)) for entry in entries]
            out = [f"{name}: {why}" for name, why in (*left_out.items(), *reasons) if why]
            return Ranking(within, out)
        _confirm(planner, unsure.slice, confirmed, left_out, named)


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


def _references(
    planner: Planner, candidates: Sequence[slices.Slice], left_out: dict[str, str], *, compile_all: bool
) -> dict[slices.Slice, Ranked]:
    """Compiled to begin with: the smallest slice of each generation that can be made to fit, or all."""
    confirmed: dict[slices.Slice, Ranked] = {}
    for generation in dict.fromkeys(target.generation for target in candidates):
        for target in sorted((t for t in candidates if t.generation is generation), key=lambda target: target.devices):
            if _confirm(planner, target, confirmed, left_out, compile_all) and not compile_all:
                break
    return confirmed


def _confirm(
    planner: Planner,
    target: slices.Slice,
    confirmed: dict[slices.Slice, Ranked],
    left_out: dict[str, str],
    named: bool,
) -> bool:
    """Compile for a slice; where it does not fit, look for what does."""
    try:
        plan: Plan | None = planner.plan(target)
        if plan is not None and not plan.fits:
            plan = find_fit(planner.config, plan, lambda overrides: planner.plan(target, overrides))
    except ConfigError as error:
        if named:
            raise
        left_out[target.name] = str(error)
        return False
    if plan is None or plan.hours is None:
        left_out[target.name] = "does not fit, nor does any variant that was tried"
        return False
    confirmed[target] = Ranked(target, plan.hours, plan.dollars, plan.dollars_spot, plan, None)
    return True


def _references_of(target: slices.Slice, confirmed: dict[slices.Slice, Ranked]) -> list[Ranked]:
    return [entry for known, entry in confirmed.items() if known.generation is target.generation]


def _entry(target: slices.Slice, confirmed: dict[slices.Slice, Ranked]) -> Ranked:
    if target in confirmed:
        return confirmed[target]
    nearest = min(
        _references_of(target, confirmed), key=lambda entry: abs(math.log(entry.slice.devices / target.devices))
    )
    return _scaled(nearest, target)


def _scaled(reference: Ranked, target: slices.Slice) -> Ranked:
    """As if the time on a chip went with its rows, and the exchange between chips took as long as before."""
    plan = reference.plan
    assert plan is not None
    assert plan.prediction is not None
    share = reference.slice.devices / target.devices
    step_s = plan.prediction.on_chip_s * share + (plan.prediction.interconnect_s or 0.0)
    ratio = step_s / plan.prediction.step_s
    cost = ratio / share

    def times(value: float | None) -> float | None:
        return None if value is None else value * cost

    return Ranked(
        target,
        reference.hours * ratio,
        times(reference.dollars),
        times(reference.dollars_spot),
        None,
        reference.slice.name,
    )
