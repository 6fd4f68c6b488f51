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
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from tinypod.errors import ConfigError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.planning.analysis import Facts
from tinypod.planning.hardware import Hardware, find_all
from tinypod.planning.planner import Plan, Planner, check
from tinypod.planning.slices import Slice
from tinypod.runs.terminal import dollars, duration, say

MAX_DEVICES = 256  # of slices that are ranked unasked
CONFIRMED = 3  # ranked slices that are compiled, from the best on
_HEADROOM = 0.98  # of the memory, that the next variant to try should need at most

logger = logging.getLogger(__name__)

Attempt = Callable[[tuple[str, ...]], Plan]  # the plan of the config with these overrides


def find_fit(config: ExperimentConfig, failed: Plan, attempt: Attempt) -> Plan | None:
    """The fastest variant found that fits; None if there is none."""
    remat = getattr(config.model, "remat", True)  # a model without the key has nothing to compute again
    for fsdp in _fsdp_sizes(failed):
        found = [
            plan
            for variant in ({}, {"model.remat": "true"})[: 1 if remat else 2]
            if (plan := _smallest_accumulation(config, _split(config, failed, fsdp) | variant, failed, attempt))
        ]
        if found:
            return min(found, key=lambda plan: plan.step_s or math.inf)
    return None


def _fsdp_sizes(failed: Plan) -> Iterator[int]:
    """The config's own, then twice that and so on; without those at which the state alone would not fit."""
    mesh, memory = failed.analysis.mesh, failed.analysis.memory
    split = memory.weights + memory.optimizer + memory.averages
    size = mesh["fsdp"]
    while size * mesh["tensor"] <= failed.devices:
        if memory.state - split + split * mesh["fsdp"] / size < _room(failed):
            yield size
        size *= 2


def _room(plan: Plan) -> int:
    return plan.usable_bytes or sys.maxsize


def _split(config: ExperimentConfig, failed: Plan, fsdp: int) -> dict[str, str]:
    if fsdp == failed.analysis.mesh["fsdp"]:
        return {}
    return {"mesh.fsdp": str(fsdp)} | ({} if config.mesh.data == -1 else {"mesh.data": "-1"})


def _smallest_accumulation(
    config: ExperimentConfig, variant: dict[str, str], failed: Plan, attempt: Attempt
) -> Plan | None:
    """The plan of a variant that fits with the batch in as few parts as possible; None if none does."""
    rows = config.batch_size // (failed.devices // failed.analysis.mesh["tensor"])  # a device's share of a batch
    parts: int | None = config.accumulation
    tried: list[tuple[int, Plan]] = [] if variant else [(config.accumulation, failed)]  # parts that did not fit
    while True:
        if tried:
            least = _next_parts(tried)
            parts = next((n for n in range(least, rows + 1) if rows % n == 0), None) if least else None
        if parts is None:
            return None
        cut = {} if parts == config.accumulation else {"accumulation": str(parts)}
        overrides = tuple(f"{key}={value}" for key, value in (variant | cut).items())
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


def _next_parts(tried: Sequence[tuple[int, Plan]]) -> int | None:
    """The smallest number of parts that may fit; None if no number can.

    Memory is taken to be `fixed + per_batch / parts`. The fixed share is at least the state; from two plans that did
    not fit follows what else does not shrink with the parts (gradients, copies of weights).
    """
    parts, plan = tried[-1]
    memory, room = plan.analysis.memory, _HEADROOM * _room(plan)
    if memory.needed <= room:  # and yet it did not fit: how much it needs is not known
        return 2 * parts
    fixed = float(memory.state)
    if len(tried) > 1:
        fewer, before = tried[-2]
        per_batch = (before.analysis.memory.needed - memory.needed) / (1 / fewer - 1 / parts)
        fixed = max(fixed, memory.needed - per_batch / parts)
    return None if fixed >= room else max(parts + 1, math.ceil(parts * (memory.needed - fixed) / (room - fixed)))


def plan_slice(planner: Planner, target: Hardware, *, search: bool = True) -> Plan:
    """Where it does not fit, with what is proposed instead; not by the memory of another compiler's program."""
    plan = planner.plan(target)
    if plan.fits or not search or plan.analysis.stand_in is not None:
        return plan
    return plan.model_copy(update={"proposal": find_fit(planner.config, plan, partial(planner.plan, target))})


class Ranked(Facts):
    """A slice in a ranking."""

    slice: str
    chips: int
    hours: float
    dollars: float | None
    dollars_spot: float | None
    overrides: tuple[str, ...] = ()
    scaled_from: str | None = None  # None: it was compiled


class Ranking(NamedTuple):
    entries: list[Ranked]  # the best first
    left_out: list[str]  # why, by slice
    notes: list[str]  # of the plans
    stopped: bool = False  # by Ctrl-C, before all were compiled that should be


class Budget(NamedTuple):
    """With a time, the cheapest is the best; with a sum alone, the fastest."""

    hours: float | None = None
    dollars: float | None = None
    spot: bool = False

    def price(self, entry: Ranked) -> float | None:
        return entry.dollars_spot if self.spot else entry.dollars

    def refusal(self, entry: Ranked) -> str | None:
        """Why a slice is not within it."""
        price = self.price(entry)
        if self.hours is not None and entry.hours > self.hours:
            return f"takes {duration(3600 * entry.hours, whole=True)}"
        if self.dollars is None or (price is not None and price <= self.dollars):
            return None
        return "its price is not known" if price is None else f"costs {dollars(price)}"

    def rank(self, entry: Ranked) -> tuple[float, float]:
        price = self.price(entry)
        dear = math.inf if price is None else price
        return (entry.hours, dear) if self.hours is None else (dear, entry.hours)


def rank(planner: Planner, targets: Sequence[Hardware] | None, budget: Budget) -> Ranking:
    """Slices that keep within the budget; those that are named are all compiled."""
    candidates = _usable(planner) if targets is None else list(targets)
    if not candidates:
        raise UserError(
            f"batch_size={planner.config.batch_size} divides over no slice that was considered; `tinypod slices` lists "
            "them, --slice names one"
        )
    plans: dict[Hardware, Plan] = {}
    left_out: dict[str, str] = {}
    stopped = False

    def entries() -> list[Ranked]:
        return sorted(_entries([one for one in candidates if one.name not in left_out], plans), key=budget.rank)

    def within() -> list[Ranked]:
        return [entry for entry in entries() if budget.refusal(entry) is None]

    try:
        while True:  # each turn compiles for one slice
            untried = [target for target in candidates if target not in plans and target.name not in left_out]
            following = _next_slice(untried, within(), plans, compile_all=targets is not None)
            if following is None:
                break
            try:
                asked = plan_slice(planner, following)
            except ConfigError as error:
                if targets is not None:
                    raise
                left_out[following.name] = str(error)
                continue
            plan = asked if asked.fits else asked.proposal
            if plan is None:
                stand_in = asked.analysis.stand_in is not None
                guess = "does not fit by the CPU's compiler; what the GPU's needs is not known"
                left_out[following.name] = guess if stand_in else "does not fit, nor does any variant that was tried"
            else:
                plans[following] = plan
            say(planner.console, f"{plan or asked}; {len(plans) + len(left_out)} of {len(candidates)} slices looked at")
    except KeyboardInterrupt:
        if not plans:
            raise
        stopped = True
    reasons = left_out | {entry.slice: why for entry in entries() if (why := budget.refusal(entry))}
    notes = sorted({note for plan in plans.values() for note in plan.notes})
    return Ranking(within(), [f"{name}: {why}" for name, why in reasons.items()], notes, stopped)


def _usable(planner: Planner) -> list[Hardware]:
    """Slices, and GPUs of which the user's own table has a price."""

    def divides(target: Hardware) -> bool:
        try:
            check(planner.config, target)
        except ConfigError:
            return False
        return True

    priced = (
        one for one in find_all(None) if isinstance(one, Slice) or one.generation.name in planner.prices.on_demand
    )
    offered = (target.times(planner.config.mesh.slices) for target in priced)
    return [target for target in offered if target.devices <= MAX_DEVICES and divides(target)]


def _next_slice(
    untried: Sequence[Hardware], within: Sequence[Ranked], plans: dict[Hardware, Plan], *, compile_all: bool
) -> Hardware | None:
    """The smallest of a generation that has no plan yet, then the best ones that are only scaled."""
    known = {target.generation for target in plans}
    for target in sorted(untried, key=lambda target: target.devices):
        if compile_all or target.generation not in known:
            return target
    unsure = [entry.slice for entry in within[:CONFIRMED] if entry.scaled_from is not None]
    return next((target for target in untried if target.name in unsure[:1]), None)


def _entries(candidates: Sequence[Hardware], plans: dict[Hardware, Plan]) -> list[Ranked]:
    """Of the slices whose generation has a plan."""
    entries = []
    for target in candidates:
        family = [known for known in plans if known.generation is target.generation]
        if family:
            nearest = min(family, key=lambda known: abs(math.log(known.devices / target.devices)))
            entries.append(_entry(target, nearest, plans[nearest]))
    return entries


def _entry(target: Hardware, reference: Hardware, plan: Plan) -> Ranked:
    """As if the time on a chip went with its rows, and the exchange between chips took as long as before."""
    prediction = plan.prediction
    assert prediction is not None
    assert plan.hours is not None
    share = reference.devices / target.devices
    between = prediction.step_s - prediction.on_chip_s
    ratio = (prediction.on_chip_s * share + between) / prediction.step_s
    compiled = target == reference
    return Ranked(
        slice=target.name,
        chips=target.chips,
        hours=plan.hours * ratio,
        dollars=None if plan.dollars is None else plan.dollars * ratio / share,
        dollars_spot=None if plan.dollars_spot is None else plan.dollars_spot * ratio / share,
        overrides=plan.overrides if compiled else (),
        scaled_from=None if compiled else reference.name,
    )
