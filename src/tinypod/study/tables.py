"""The tables of a report, as text; the page and the Markdown file show the same ones."""

from dataclasses import dataclass, field

from tinypod.study import numbers
from tinypod.study.answers import Analysis, BatchScaling, Cost, Scaling, Variant, short
from tinypod.study.fits import MIN_LEVELS
from tinypod.study.results import RunResult

STATES = {
    "done": "done",
    "stopped_early": "stopped early",
    "diverged": "diverged",
    "failed": "failed",
    "running": "running",
    "waiting": "waiting",
}
ENTERS = {
    "done": "in the means",
    "stopped_early": "in the means, with the last evaluation before the stop",
    "diverged": "left out of the means; never reached the target unless it did so before",
    "failed": "left out of the means; never reached the target unless it did so before",
    "running": "not in the means yet",
    "waiting": "not in the means yet",
}


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    words: tuple[str, ...] = ()  # columns of sentences, beside the first, which has names; the others are numbers

    def markdown(self) -> str:
        rule = ["---" if i == 0 or name in self.words else "---:" for i, name in enumerate(self.columns)]
        lines = [self.columns, rule, *self.rows]
        text = "\n".join("| " + " | ".join(plain_markdown(cell) for cell in line) + " |" for line in lines)
        return "\n\n".join([f"## {plain_markdown(self.title)}", text, *(plain_markdown(note) for note in self.notes)])


def all_tables(analysis: Analysis) -> dict[str, Table]:
    """By name, in the report's order; those with nothing to say are left out."""
    found = {
        "variants": variants_table(analysis),
        "differences": differences_table(analysis),
        "scaling": scaling_table(analysis),
        "target": target_table(analysis),
        "critical_batch": critical_batch_table(analysis),
        "gap": gap_table(analysis),
        "costs": costs_table(analysis),
        "ends": ends_table(analysis),
        "states": states_table(analysis),
    }
    return {name: table for name, table in found.items() if table is not None}


def variants_table(analysis: Analysis) -> Table:
    label, show = analysis.file.metric_label, analysis.numbers
    rows = [
        [variant.name, show.spread(variant.final), show.spread(variant.best), _counted(variant)]
        for variant in analysis.variants
    ]
    notes = [
        "Mean ± sd over seeds (the sample's sd, over n − 1). Final: the last evaluation. Best: the best of a run's "
        "evaluations."
    ]
    if any(variant.final is not None and variant.final.sd is None for variant in analysis.variants):
        notes.append("One run alone has no spread: a value without ± says nothing about the next seed.")
    return Table("Results by variant", ["variant", f"final {label}", f"best {label}", "runs counted"], rows, notes)


def differences_table(analysis: Analysis) -> Table | None:
    if not analysis.comparisons:
        return None
    show, first = analysis.numbers, analysis.variants[0].name
    rows = []
    for comparison in analysis.comparisons:
        final, best = comparison.final, comparison.best
        known = comparison.first.final is not None and comparison.variant.final is not None
        plain = _plain_difference(analysis, comparison.variant) if known else numbers.NONE
        rows.append(
            [
                comparison.variant.name,
                show.change(final.difference) if final else plain,
                comparison.verdict,
                show.interval(final) if final else numbers.NONE,
                show.interval(best) if best else numbers.NONE,
            ]
        )
    notes = [
        f"Each variant less {first}. The intervals are Welch's t intervals at 95 % (spreads and numbers of seeds may "
        "differ). Where an interval contains 0, these seeds do not tell the two apart; the verdict says how many "
        "would, four times in five, if the difference seen were the true one. Verdicts are about the final metric."
    ]
    if len(rows) > 1:
        notes.append(f"Each interval stands by itself; Holm's correction allows for there being {len(rows)} of them.")
    columns = ["variant", "difference, final", "verdict", "95 % interval, final", "95 % interval, best"]
    return Table(f"Differences to {first}", columns, rows, notes, words=("verdict",))


def scaling_table(analysis: Analysis) -> Table | None:
    if not analysis.scalings:
        return None
    rows = [
        [short(scaling.size), scaling.group or "all", str(len(scaling.values)), *_power_law(scaling)]
        for scaling in analysis.scalings
    ]
    notes = [
        f"{analysis.scaled} = scale · size^exponent, fitted by least squares to the logarithms of the runs' final "
        "values; 95 % interval from the fit's covariance. A limit that the metric approaches is not part of the law."
    ]
    if any(scaling.fit is not None and scaling.fit.bends for scaling in analysis.scalings):
        notes.append(
            "“Bends”: the sizes leave the line by more than the seeds explain (lack-of-fit F test, p < 0.05). The "
            "interval is then of the means of the sizes, and the exponent describes this range of sizes only."
        )
    columns = ["size", "others", "runs", "exponent (95 %)", "scale", "does a power law fit?"]
    return Table("Power laws", columns, rows, notes, words=("others", "does a power law fit?"))


def target_table(analysis: Analysis) -> Table | None:
    target = analysis.file.target
    if target is None:
        return None
    rows = []
    for variant in analysis.variants:
        assert variant.target is not None
        found = variant.target
        never = "never" if found.num_runs else numbers.NONE
        medians = (
            [numbers.steps(found.steps), numbers.seconds(found.seconds)] if found.steps is not None else [never] * 2
        )
        rows.append([variant.name, *medians, f"{found.num_reached} of {found.num_runs}"])
    notes = [
        "Median over runs, in which a run that never got there counts as later than all others; “never”: half of the "
        "runs or more did not. Steps are linear between two evaluations. Runs still running count once they end or get "
        "there.",
        _time_note(analysis),
    ]
    title = f"Time to {analysis.numbers.value(target)} {analysis.file.metric_label}"
    return Table(title, ["variant", "steps", "time", "runs that reached it"], rows, notes)


def critical_batch_table(analysis: Analysis) -> Table | None:
    if not analysis.batch_scalings:
        return None
    rows = [[scaling.group or "all", *_critical_batch(scaling)] for scaling in analysis.batch_scalings]
    notes = [
        "steps to the target = S_min · (1 + B_crit / batch) (McCandlish et al. 2018), fitted to logarithms over the "
        "runs that reached it; 95 % interval from the fit's covariance. At B_crit a run takes twice the fewest steps "
        "and twice the fewest examples."
    ]
    if at_first := sum(scaling.num_at_first for scaling in analysis.batch_scalings):
        notes.append(
            f"{at_first} of these runs had reached the target by their first evaluation, so their steps are too many: "
            "evaluate more often (`eval.every_steps`), or set a higher target."
        )
    if any(scaling.num_never for scaling in analysis.batch_scalings):
        notes.append(
            "Runs that never reached the target are not in the fit, which is then too kind to their batch sizes."
        )
    columns = ["others", "runs that reached it", "B_crit (95 %)", "S_min (95 %)", "can it be told?"]
    return Table("Critical batch size", columns, rows, notes, words=("can it be told?",))


def gap_table(analysis: Analysis) -> Table | None:
    show = analysis.numbers
    variants = [variant for variant in analysis.variants if variant.gap is not None]
    rows = [[v.name, _gap(analysis, v), show.spread(v.train), show.spread(v.final)] for v in variants]
    if not rows:
        return None
    label = analysis.file.metric_label
    notes = [
        f"Gap: {label} in training (over the last tenth of the steps) less held out (the last evaluation). Training "
        "scores are of the weights being trained, on the batches as drawn; held-out scores of those that "
        "`eval.weights` names."
    ]
    columns = ["variant", "gap", f"{label} in training", f"{label} held out"]
    return Table("Training against held out", columns, rows, notes)


def costs_table(analysis: Analysis) -> Table | None:
    if not analysis.costs:
        return None
    fronts = {cost.name: _names_on(cost) for cost in analysis.costs}
    rows = []
    for v in analysis.variants:
        if v.final is None:
            continue
        marks = ", ".join(name for name, names in fronts.items() if v.name in names)
        cells = [numbers.count(v.num_weights), numbers.quantity(v.flops, "FLOP"), numbers.seconds(v.seconds)]
        rows.append([v.name, analysis.numbers.spread(v.final), *cells, marks or numbers.NONE])
    notes = [
        "Means over the runs counted. A variant is on the Pareto front of a cost if no other is at least as good at no "
        "more cost; seeds are not allowed for, so neighbours on a front may be equals. Compute: FLOPs of a step as the "
        "task counts them, times steps.",
        _time_note(analysis),
    ]
    columns = ["variant", f"final {analysis.file.metric_label}", "weights", "compute", "time", "on the front of"]
    return Table("Costs", columns, rows, notes, words=("on the front of",))


def ends_table(analysis: Analysis) -> Table | None:
    """Runs that are not simply done."""
    rows = [
        [run.entry.name, STATES[run.outcome.state], numbers.steps(run.outcome.step), how_it_enters(run), _reason(run)]
        for run in analysis.runs
        if run.outcome.state != "done" or not run.counts
    ]
    columns, words = ["run", "state", "step", "how it enters", "reason"], ("state", "how it enters", "reason")
    notes = ["Leaving out runs that diverged flatters their variant: its mean speaks of the runs that survived."]
    diverged = any(run.outcome.state == "diverged" for run in analysis.runs)
    title = "Runs that did not end as planned"
    return Table(title, columns, rows, notes if diverged else [], words) if rows else None


def states_table(analysis: Analysis) -> Table:
    """Every run."""
    show = analysis.numbers
    rows = []
    for run in analysis.runs:
        values = [show.value(run.final), show.value(run.best)] if run.counts else [numbers.NONE] * 2
        rows.append(
            [
                run.entry.name,
                STATES[run.outcome.state],
                numbers.steps(run.outcome.step),
                *values,
                numbers.seconds(run.seconds),
            ]
        )
    label = analysis.file.metric_label
    return Table(
        "All runs", ["run", "state", "step", f"final {label}", f"best {label}", "time"], rows, words=("state",)
    )


def how_it_enters(run: RunResult) -> str:
    if run.outcome.state in ("done", "stopped_early") and not run.counts:
        return "left out of the means: " + ("its last evaluation is not finite" if len(run.metric) else "no evaluation")
    return ENTERS[run.outcome.state]


def _counted(variant: Variant) -> str:
    early = sum(run.outcome.state == "stopped_early" for run in variant.counted)
    return f"{len(variant.counted)} of {len(variant.runs)}" + (f", {early} stopped early" if early else "")


def _plain_difference(analysis: Analysis, variant: Variant) -> str:
    first = analysis.variants[0].final
    assert first is not None
    assert variant.final is not None
    return analysis.numbers.change(variant.final.mean - first.mean)


def _power_law(scaling: Scaling) -> list[str]:
    fit = scaling.fit
    if fit is None:
        return [numbers.NONE, numbers.NONE, f"fewer than {MIN_LEVELS} sizes with a result"]
    left_out = f"; {scaling.num_left_out} runs at 0 or below left out" if scaling.num_left_out else ""
    says = {None: "one seed per size: not tested", True: "bends", False: "yes, within what seeds explain"}
    word = says[None if fit.bends_p is None else fit.bends]
    return [numbers.between(fit.exponent), numbers.significant(fit.scale), word + left_out]


def _critical_batch(scaling: BatchScaling) -> list[str]:
    reached = f"{len(scaling.steps)} of {len(scaling.steps) + scaling.num_never}"
    fit = scaling.fit
    if fit is None:
        return [reached, numbers.NONE, numbers.NONE, f"no: {why_no_batch(scaling)}"]
    cells = [numbers.between(fit.batch_crit, "steps"), numbers.between(fit.steps_min, "steps")]
    return [
        reached,
        *(cells if fit.determined else [numbers.NONE] * 2),
        "yes" if fit.determined else f"no: {why_no_batch(scaling)}",
    ]


def why_no_batch(scaling: BatchScaling) -> str:
    if scaling.fit is None:
        return f"fewer than {MIN_LEVELS} batch sizes reached the target"
    return "it lies outside the batch sizes tried, or the runs scatter too much"


def _gap(analysis: Analysis, variant: Variant) -> str:
    gap, show = variant.gap, analysis.numbers
    assert gap is not None
    if gap.sd is None:
        return show.change(gap.mean)
    return f"{show.change(gap.mean).removesuffix(' pp')} ± {show.change(gap.sd).removeprefix('+')}"


def _time_note(analysis: Analysis) -> str:
    note = "Time: seconds of training steps, without compiling, evaluating and saving."
    packed = max((run.outcome.packed for run in analysis.runs), default=1)
    if packed > 1:
        note += f" Runs were packed, up to {packed} at once: each is given its equal part of its pack's time."
    return note


def _names_on(cost: Cost) -> set[str]:
    return {variant.name for (variant, _), on in zip(cost.points, cost.on_front, strict=True) if on}


def _reason(run: RunResult) -> str:
    return run.outcome.reason or numbers.NONE


def plain_markdown(text: str) -> str:
    """As it is: a reason may hold line breaks, and a variant's name a bar."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
