"""What a study says in short, as sentences: which variant is best, what the seeds can tell, what to beware of."""

from tinypod.study import numbers
from tinypod.study.answers import Analysis, short
from tinypod.study.tables import why_no_batch

_NAMED = 5  # of a list of names; the tables have all of them


def sentences(analysis: Analysis) -> list[str]:
    """What the study says, in short."""
    found = [_runs_sentence(analysis), *_best_sentences(analysis), *_comparison_sentences(analysis)]
    found += [
        f"{_capital(analysis.scaled)} goes as {short(scaling.size)} to the power "
        + numbers.between(scaling.fit.exponent)
        + (f" for {scaling.group}" if scaling.group else "")
        + ("; it bends away from a power law." if scaling.fit.bends else ".")
        for scaling in analysis.scalings
        if scaling.fit is not None
    ]
    for batch in analysis.batch_scalings:
        where = f" for {batch.group}" if batch.group else ""
        if batch.fit is not None and batch.fit.determined:
            found.append(f"Critical batch size{where}: {numbers.between(batch.fit.batch_crit, 'steps')}.")
        else:
            found.append(f"The critical batch size{where} cannot be told: {why_no_batch(batch)}.")
    return found + _warning_sentences(analysis)


def _runs_sentence(analysis: Analysis) -> str:
    counted, total = sum(run.counts for run in analysis.runs), len(analysis.runs)
    variants = len(analysis.variants)
    per = sorted({len(variant.counted) for variant in analysis.variants})
    seeds = f"{per[0]}" if len(per) == 1 else f"{per[0]} to {per[-1]}"
    plural = "" if variants == 1 else "s"
    return f"{_runs(total)} of {variants} variant{plural}; {counted} count in the means, {seeds} a variant."


def _best_sentences(analysis: Analysis) -> list[str]:
    ranked, show = analysis.ranked, analysis.numbers
    if not ranked:
        return [f"No run has a finite {analysis.file.metric} yet that could count."]
    best = ranked[0]
    word = "Highest" if analysis.file.direction == "max" else "Lowest"
    text = f"{word} mean {analysis.file.metric_label}: {best.name} with {show.spread(best.final)}."
    if analysis.top is None:
        return [text]
    top = analysis.top
    runner_up = f"The next is {top.first.name} with {show.spread(top.first.final)}"
    if top.final is None:
        return [text, f"{runner_up}; whether they differ: {top.verdict}."]
    told = "these seeds tell the two apart" if top.tells_apart else "these seeds do not tell the two apart"
    if top.tells_apart and not top.holds:
        told += f" by themselves, but not once {len(analysis.comparisons)} comparisons are allowed for (Holm)"
    difference = f"difference {show.change(top.final.difference)}, 95 % interval {show.interval(top.final)}"
    return [text, f"{runner_up}; {told} ({difference})."]


def _comparison_sentences(analysis: Analysis) -> list[str]:
    comparisons, first = analysis.comparisons, analysis.variants[0].name
    if not comparisons:
        return ["One variant alone: there is nothing to compare it with."]
    names = {word: [c.variant.name for c in comparisons if c.verdict == word] for word in ("better", "worse")}
    parts = [f"{len(found)} {word} ({_listed(found)})" for word, found in names.items() if found]
    if rest := [c.variant.name for c in comparisons if not c.holds]:
        parts.append(f"{len(rest)} not told apart with these seeds ({_listed(rest)})")
    others = f", of the {len(comparisons)} others" if len(comparisons) > 1 else ""
    return [f"Against {first}{others}: {', '.join(parts)}."]


def _warning_sentences(analysis: Analysis) -> list[str]:
    found = []
    if few := [variant.name for variant in analysis.variants if len(variant.counted) < 2]:
        names = "every variant" if len(few) == len(analysis.variants) else _listed(few)
        found.append(f"Too few seeds: fewer than 2 runs count for {names}, so there is no interval to judge by.")
    if left_out := [run.entry.name for run in analysis.runs if run.ended and not run.counts]:
        found.append(f"Ended, but left out of the means: {_runs(len(left_out))} ({_listed(left_out)}).")
    if early := sum(run.outcome.state == "stopped_early" for run in analysis.runs):
        found.append(
            f"Stopped early by a rule, and in the means with the last evaluation before the stop: {_runs(early)}."
        )
    if unfinished := sum(not run.ended for run in analysis.runs):
        found.append(f"Not ended yet: {_runs(unfinished)}. The study is still running, and its answers may change.")
    return found


def _listed(names: list[str]) -> str:
    """Names may hold commas."""
    more = f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def _runs(count: int) -> str:
    return f"{count:,} run{'' if count == 1 else 's'}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
