"""What a study's runs say together: variants, differences to the first, costs, scaling, time to the target.

Everything a report shows is computed here, once, so that tables, sentences and figures cannot disagree.
"""

import math
import statistics as plain
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tinypod.study import fits
from tinypod.study.fits import CriticalBatch, PowerLaw
from tinypod.study.numbers import MetricNumbers
from tinypod.study.results import RunEntry, RunResult, Study, StudyFile
from tinypod.study.statistics import Difference, Spread, holm, seeds_needed, spread, welch

_SIZED = ("model", "data", "task")  # sections whose whole numbers are sizes
_NO_SIZE = ("weight", "rate", "decay", "seed", "exploration")
_SIGNIFICANT = 0.05


@dataclass(frozen=True)
class TargetSummary:
    """Of the runs that ended or reached it: one that is still running may reach it yet."""

    num_runs: int
    num_reached: int
    steps: (
        float | None
    )  # medians over runs, a run that never reached it as infinity. None: half of them or more did not
    seconds: float | None


@dataclass(frozen=True)
class Variant:
    name: str
    levels: dict[str, Any]
    runs: list[RunResult]
    final: Spread | None
    best: Spread | None
    gap: Spread | None  # training less held out
    train: Spread | None
    target: TargetSummary | None
    num_weights: float | None
    flops: float | None
    seconds: float | None

    @property
    def counted(self) -> list[RunResult]:
        return [run for run in self.runs if run.counts]


@dataclass(frozen=True)
class Comparison:
    """Of a variant with the first; `final` is None where the seeds cannot say anything."""

    first: Variant
    variant: Variant
    final: Difference | None
    best: Difference | None
    adjusted_p: float | None  # Holm's, over all comparisons of the study
    verdict: str

    @property
    def tells_apart(self) -> bool:
        return self.final is not None and self.final.tells_apart

    @property
    def holds(self) -> bool:
        """Told apart, also with every comparison of the study allowed for."""
        return self.tells_apart and (self.adjusted_p is None or self.adjusted_p < _SIGNIFICANT)


@dataclass(frozen=True)
class Cost:
    """Final metric against what it cost, by variant."""

    name: str  # weights, compute, time
    points: list[tuple[Variant, float]]
    on_front: list[bool]


@dataclass(frozen=True)
class Scaling:
    """What was left to gain (or the metric itself) against a size, one point a run."""

    size: str  # the factor's key, or "weights"
    group: str  # the other factors' levels; "" where there are none
    sizes: list[float]
    values: list[float]
    num_left_out: int  # values that are not positive have no logarithm
    fit: PowerLaw | None


@dataclass(frozen=True)
class BatchScaling:
    group: str
    batches: list[float]
    steps: list[float]
    num_never: int  # runs that did not reach the target, at any batch size
    num_at_first: int  # runs that had reached it by their first evaluation: their steps are upper bounds
    fit: CriticalBatch | None


@dataclass(frozen=True)
class Analysis:
    file: StudyFile
    numbers: MetricNumbers
    runs: list[RunResult]
    variants: list[Variant]
    comparisons: list[Comparison]
    top: Comparison | None  # the best variant by its mean, against the next
    costs: list[Cost]
    scalings: list[Scaling]
    batch_scalings: list[BatchScaling]

    @property
    def scaled(self) -> str:
        """What the power laws are of."""
        return f"1 − {self.file.metric_label}" if self.uses_error else self.file.metric_label

    @property
    def uses_error(self) -> bool:
        return self.numbers.is_share and self.file.direction == "max"

    @property
    def ranked(self) -> list[Variant]:
        """Variants with a result, the best first."""
        found = [variant for variant in self.variants if variant.final is not None]
        return sorted(found, key=_mean, reverse=self.file.direction == "max")


def analyse(study: Study) -> Analysis:
    file = study.file
    names = list(dict.fromkeys(run.entry.variant for run in study.runs))
    variants = [_variant(name, [run for run in study.runs if run.entry.variant == name], file) for name in names]
    analysis = Analysis(
        file=file,
        numbers=MetricNumbers(file.metric_format),
        runs=study.runs,
        variants=variants,
        comparisons=_compare(variants, file),
        top=None,
        costs=_costs(variants, file),
        scalings=[],
        batch_scalings=_batch_scalings(study),
    )
    ranked = analysis.ranked
    top = _top(ranked[0], ranked[1], analysis) if len(ranked) > 1 else None
    scalings = _scalings(study, uses_error=analysis.uses_error)
    return Analysis(**(vars(analysis) | {"top": top, "scalings": scalings}))


def short(key: str) -> str:
    """`model.hidden_size` as `hidden_size`."""
    return key.rpartition(".")[2]


def _variant(name: str, runs: list[RunResult], file: StudyFile) -> Variant:
    counted = [run for run in runs if run.counts]
    gaps = [run.gap for run in counted if run.gap is not None]
    return Variant(
        name,
        runs[0].entry.levels,
        runs,
        final=spread([run.final for run in counted]),
        best=spread([run.best for run in counted]),
        gap=spread([train - held_out for train, held_out in gaps]),
        train=spread([train for train, _ in gaps]),
        target=None if file.target is None else _target(runs, file.target),
        num_weights=_mean_of(run.entry.num_weights for run in runs),
        flops=_mean_of(run.flops for run in counted),
        seconds=_mean_of(run.seconds for run in counted),
    )


def _target(runs: list[RunResult], target: float) -> TargetSummary:
    found = [(run, run.step_reaching(target)) for run in runs]
    asked = [(run, step) for run, step in found if run.ended or step is not None]
    steps = [math.inf if step is None else step for _, step in asked]
    times = [math.inf if step is None else _or_infinity(run.seconds_at(step)) for run, step in asked]
    reached = sum(step is not None for _, step in asked)
    return TargetSummary(len(asked), reached, _finite_median(steps), _finite_median(times))


def _compare(variants: list[Variant], file: StudyFile) -> list[Comparison]:
    first, others = variants[0], variants[1:]
    found = [_difference(first.final, other.final) for other in others]
    known = [difference for difference in found if difference is not None]
    adjusted = iter(holm([difference.p for difference in known]))
    return [
        _comparison(first, other, file, None if difference is None else next(adjusted), len(known))
        for other, difference in zip(others, found, strict=True)
    ]


def _top(best: Variant, following: Variant, analysis: Analysis) -> Comparison:
    """With the p-value that the table of differences has, where this pair stands there."""
    pair = {best.name, following.name}
    same = [c for c in analysis.comparisons if {c.first.name, c.variant.name} == pair]
    adjusted_p = same[0].adjusted_p if same else None
    return _comparison(following, best, analysis.file, adjusted_p, len(analysis.comparisons))


def _comparison(
    first: Variant, variant: Variant, file: StudyFile, adjusted_p: float | None, num_comparisons: int
) -> Comparison:
    final, best = _difference(first.final, variant.final), _difference(first.best, variant.best)
    verdict = _verdict(first.final, variant.final, final, file, adjusted_p, num_comparisons)
    return Comparison(first, variant, final, best, adjusted_p, verdict)


def _verdict(
    first: Spread | None,
    second: Spread | None,
    found: Difference | None,
    file: StudyFile,
    adjusted_p: float | None,
    num_comparisons: int,
) -> str:
    """In words; plain where the seeds are too few."""
    if first is None or second is None:
        return "cannot tell: no run counts"
    if first.sd is None or second.sd is None:
        return f"cannot tell: it takes at least 2 seeds of each, and there are {first.n} and {second.n}"
    if found is None:
        return "equal in every seed" if math.isclose(first.mean, second.mean) else "no spread over seeds to judge by"
    if not found.tells_apart:
        needed = seeds_needed(found.difference, first.sd, second.sd)
        how_many = "over 1,000" if needed is None else f"about {needed:,}"
        return f"too few seeds to tell: a difference of this size takes {how_many} of each"
    better = (found.difference > 0) == (file.direction == "max")
    verdict = "better" if better else "worse"
    if adjusted_p is not None and adjusted_p >= _SIGNIFICANT:  # as in Comparison.holds
        return f"{verdict} by itself, not once {num_comparisons} comparisons are allowed for (Holm)"
    return verdict


def _difference(first: Spread | None, second: Spread | None) -> Difference | None:
    return None if first is None or second is None else welch(first, second)


def _costs(variants: list[Variant], file: StudyFile) -> list[Cost]:
    costs = []
    for name, attribute in (("weights", "num_weights"), ("compute", "flops"), ("time", "seconds")):
        points = [(v, getattr(v, attribute)) for v in variants if v.final is not None and getattr(v, attribute)]
        if len({cost for _, cost in points}) > 1:  # of equal costs there is nothing to trade
            values = [_mean(variant) for variant, _ in points]
            costs.append(Cost(name, points, fits.pareto_front([cost for _, cost in points], values, file.direction)))
    return costs


def is_size(key: str, levels: Sequence[Any]) -> bool:
    """Whether a factor is a size that power laws are asked of: three or more whole numbers of a model, data or task."""
    if key != "steps" and (key.partition(".")[0] not in _SIZED or any(word in short(key) for word in _NO_SIZE)):
        return False
    numbers = [level for level in levels if isinstance(level, int | float) and not isinstance(level, bool)]
    whole = all(number > 0 and float(number).is_integer() for number in numbers)
    return whole and len(numbers) == len(levels) and len(set(numbers)) >= fits.MIN_LEVELS


def _scalings(study: Study, *, uses_error: bool) -> list[Scaling]:
    scalings = []
    for key, levels in study.file.factors.items():
        if not is_size(key, levels):
            continue
        for group, runs in _groups(study, key).items():
            runs = [run for run in runs if run.counts]
            values = [1 - run.final if uses_error else run.final for run in runs]
            scalings.append(_scaling(key, group, [float(run.entry.levels[key]) for run in runs], values))
            weights = [run.entry.num_weights for run in runs]
            # Over weights too, where it is the model that grows: the law that other models can be compared by.
            if key.startswith("model.") and None not in weights and len(set(weights)) >= fits.MIN_LEVELS:
                scalings.append(_scaling("weights", group, [float(number or 0) for number in weights], values))
    return scalings


def _scaling(size: str, group: str, sizes: list[float], values: list[float]) -> Scaling:
    kept = [(size, value) for size, value in zip(sizes, values, strict=True) if value > 0]
    sizes, values, left_out = [size for size, _ in kept], [value for _, value in kept], len(sizes) - len(kept)
    return Scaling(size, group, sizes, values, left_out, fits.fit_power_law(sizes, values))


def _batch_scalings(study: Study) -> list[BatchScaling]:
    target = study.file.target
    if "batch_size" not in study.file.factors or target is None:
        return []
    scalings = []
    for group, runs in _groups(study, "batch_size").items():
        found = [(run, run.step_reaching(target)) for run in runs if run.ended]
        reached = [(run, step) for run, step in found if step]  # not at step 0 either: it has no logarithm
        batches = [float(run.entry.levels["batch_size"]) for run, _ in reached]
        steps = [step for _, step in reached]
        at_first = sum(step == run.metric.steps[0] for run, step in reached)
        fit = fits.fit_critical_batch(batches, steps)
        scalings.append(BatchScaling(group, batches, steps, len(found) - len(reached), at_first, fit))
    return scalings


def _groups(study: Study, key: str) -> dict[str, list[RunResult]]:
    """Runs that differ in this factor and the seed alone, by the levels of the others.

    Where factors go together (zipped lists, a search) there are no such runs: then it is one group of all.
    """
    groups: dict[str, list[RunResult]] = {}
    runs = [run for run in study.runs if key in run.entry.levels]
    for run in runs:
        groups.setdefault(_others(run.entry, key), []).append(run)
    wide = {name: group for name, group in groups.items() if _num_levels(group, key) >= fits.MIN_LEVELS}
    return wide or {"others vary too": runs}


def _num_levels(runs: list[RunResult], key: str) -> int:
    return len({run.entry.levels[key] for run in runs})


def _others(entry: RunEntry, key: str) -> str:
    return ",".join(f"{short(name)}={level}" for name, level in entry.levels.items() if name != key)


def _mean(variant: Variant) -> float:
    assert variant.final is not None
    return variant.final.mean


def _mean_of(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return plain.fmean(found) if found else None


def _finite_median(values: list[float]) -> float | None:
    middle = plain.median(values) if values else math.inf
    return middle if math.isfinite(middle) else None


def _or_infinity(value: float | None) -> float:
    return math.inf if value is None else value
