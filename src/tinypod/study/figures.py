"""The figures of a report: each drawn once, and written as PNG, as SVG for the page, and as CSV.

The SVG's colours become CSS variables, so that the page shows it in light and in dark, and its text stays text. Figures
are small (one panel, as wide as a phone) and stand side by side where there is room.
"""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import Bbox

from tinypod.runs.curves import smooth
from tinypod.study import numbers
from tinypod.study.answers import Analysis, BatchScaling, Cost, Scaling, Variant, short
from tinypod.study.results import Curve, RunResult

INK, GRID, AXIS, QUIET = "#3a3f45", "#e4e7eb", "#b8bec6", "#a3a9b1"
SERIES = ("#2a78b5", "#d1495b", "#2e8b57", "#c77d0a", "#7b5ea7", "#178f9c", "#a0522d", "#5f6b7a")
_SHOWN = len(SERIES)  # variants in colour; of more, the first and the best
_ROWS = 40  # variants in the figure of final values; of more, the first and the best
_GRID_LEVELS = 12  # of a factor, at most, in the table of colours
_GRID_POINTS = 300  # of a curve that is drawn
_WIDTH, _HEIGHT = 4.9, 3.4
_TEXT: dict[str, Any] = {"fontsize": 9, "color": INK}


@dataclass(frozen=True)
class Plot:
    name: str  # of its files
    title: str
    caption: str
    figure: Figure
    columns: list[str]
    rows: list[list[Any]]

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=200, facecolor="white")
        return buffer.getvalue()

    def svg(self) -> str:
        """To stand inside a page: colours as CSS variables, ids that no other figure has."""
        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name, "font.family": "sans-serif"}):
            no_metadata = {"Creator": None, "Date": None, "Format": None, "Type": None}
            self.figure.savefig(buffer, format="svg", facecolor="none", metadata=no_metadata)
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{self.name}-", text)
        text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg ', self._opening, text, count=1)
        for color, variable in VARIABLES.items():
            text = text.replace(color, f"var(--{variable})")
        return text

    def _opening(self, match: re.Match[str]) -> str:
        return f'<svg role="img" aria-label="{self.name}" {match[1] or ""}'

    def csv(self) -> str:
        return write_csv(self.columns, self.rows)


VARIABLES = {INK: "ink", GRID: "grid", AXIS: "axis", QUIET: "quiet"} | {
    color: f"series-{number}" for number, color in enumerate(SERIES)
}


def write_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([columns, *(["" if cell is None else cell for cell in row] for row in rows)])
    return buffer.getvalue()


def all_plots(analysis: Analysis) -> list[Plot]:
    """In the report's order; those without data are left out."""
    colors = _colors(analysis)
    label = analysis.file.metric_label
    found: list[Plot | None] = [
        plot_final(analysis, colors),
        plot_grid(analysis),
        plot_curves(analysis, colors, "curves", f"Held-out {label} over steps", lambda run: run.metric),
        plot_curves(analysis, colors, "train_curves", f"{label} in training over steps", _smoothed_train),
        plot_curves(analysis, colors, "loss", "Training loss over steps", _smoothed_loss),
        *(plot_cost(analysis, cost) for cost in analysis.costs),
        *(plot_scaling(analysis, scaling, number) for number, scaling in enumerate(analysis.scalings, start=1)),
        *(plot_batch(scaling, number) for number, scaling in enumerate(analysis.batch_scalings, start=1)),
    ]
    return [plot for plot in found if plot is not None]


def plot_final(analysis: Analysis, colors: dict[str, str]) -> Plot | None:
    """A row for each variant: its seeds, their mean and sd."""
    variants = [variant for variant in analysis.variants if variant.final is not None]
    if not variants:
        return None
    rows: list[list[Any]] = [[v.name, run.entry.seed, run.final, run.best] for v in variants for run in v.counted]
    caption = "Each dot is a run (seed), each diamond the mean, the bar ± 1 sd over seeds."
    if len(variants) > _ROWS:
        caption += f" Of {len(variants)} variants, the first and the best."
        kept = set(list(dict.fromkeys([variants[0].name, *(v.name for v in analysis.ranked)]))[:_ROWS])
        variants = [variant for variant in variants if variant.name in kept]
    axes = _axes(height=1.1 + 0.32 * len(variants))
    for place, variant in enumerate(variants):
        final, color = variant.final, colors[variant.name]
        assert final is not None
        values = [run.final for run in variant.counted]
        axes.plot(values, [place] * len(values), "o", color=color, ms=5, alpha=0.45, mew=0)
        axes.errorbar(final.mean, place, xerr=final.sd, fmt="D", color=color, ms=5, capsize=3, linewidth=1.6)
    axes.set_yticks(range(len(variants)), [_cut(variant.name) for variant in variants])
    axes.set_ylim(len(variants) - 0.4, -0.6)
    _metric_axis(analysis, axes, "x")
    axes.grid(False, axis="y")
    title = f"Final {analysis.file.metric_label} by variant"
    return Plot("final", title, caption, _figure(axes), ["variant", "seed", "final", "best"], rows)


def plot_grid(analysis: Analysis) -> Plot | None:
    """Two factors: the means as a table of colours."""
    if len(analysis.file.factors) != 2:
        return None
    (row_key, row_levels), (column_key, column_levels) = analysis.file.factors.items()
    cells = len(row_levels) * len(column_levels)
    if max(len(row_levels), len(column_levels)) > _GRID_LEVELS or 2 * len(analysis.variants) < cells:
        return None  # zipped factors, or a search: most of the table would be empty
    means = np.full((len(row_levels), len(column_levels)), np.nan)
    rows: list[list[Any]] = []
    for variant in analysis.variants:
        row_level, column_level = variant.levels.get(row_key), variant.levels.get(column_key)
        if variant.final is not None and row_level in row_levels and column_level in column_levels:
            at = row_levels.index(row_level), column_levels.index(column_level)
            means[at] = variant.final.mean
            rows.append([row_level, column_level, means[at], variant.final.sd])
    if not rows:
        return None
    axes = _axes(height=1.2 + 0.42 * len(row_levels))
    colormap = matplotlib.colormaps["Blues" if analysis.file.direction == "max" else "Blues_r"]
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    for (i, j), mean in np.ndenumerate(means):
        share = (mean - low) / (high - low) if high > low else 0.5
        if np.isfinite(mean):
            axes.add_patch(Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, color=colormap(0.15 + 0.7 * share)))
            dark = share > 0.55 if analysis.file.direction == "max" else share < 0.45
            axes.text(
                j,
                i,
                analysis.numbers.value(mean),
                ha="center",
                va="center",
                fontsize=9,
                color="#ffffff" if dark else "#1a2330",
            )
        else:
            axes.text(j, i, numbers.NONE, ha="center", va="center", **_TEXT)
    axes.set_xticks(range(len(column_levels)), [_cut(str(level), 16) for level in column_levels])
    axes.set_yticks(range(len(row_levels)), [_cut(str(level), 16) for level in row_levels])
    axes.set_xlim(-0.5, len(column_levels) - 0.5)
    axes.set_ylim(len(row_levels) - 0.5, -0.5)
    axes.set_xlabel(short(column_key), **_TEXT)
    axes.set_ylabel(short(row_key), **_TEXT)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    title = f"Mean final {analysis.file.metric_label} by {short(row_key)} and {short(column_key)}"
    columns = [row_key, column_key, "mean_final", "sd_final"]
    return Plot("grid", title, "Means over seeds; darker is better.", _figure(axes), columns, rows)


def plot_curves(
    analysis: Analysis, colors: dict[str, str], name: str, title: str, curve: Callable[[RunResult], Curve]
) -> Plot | None:
    axes = _axes()
    rows: list[list[Any]] = []
    lowest, highest, shortened = np.inf, -np.inf, False
    for variant in analysis.variants:
        steps, mean, sd, count = mean_curve([curve(run) for run in variant.counted])
        if not len(steps):
            continue
        rows += [[variant.name, *row] for row in zip(steps, mean, np.where(count > 1, sd, np.nan), count, strict=True)]
        color = colors[variant.name]
        quiet = color == QUIET
        whole = count == count.max()
        end = int(np.flatnonzero(whole)[-1]) + 1
        marker = "o" if len(steps) <= 12 else ""
        style: dict[str, Any] = {"color": color, "linewidth": 0.8 if quiet else 1.7, "zorder": 1 if quiet else 2}
        axes.plot(steps[:end], mean[:end], **style, marker=marker, ms=3, label=None if quiet else _cut(variant.name))
        if end < len(steps):
            axes.plot(steps[end - 1 :], mean[end - 1 :], ":", **style)
            shortened = True
        if count.max() > 1 and not quiet:
            axes.fill_between(steps, mean - sd, mean + sd, color=color, alpha=0.18, linewidth=0)
        lowest, highest = min(lowest, float(mean.min())), max(highest, float(mean.max()))
    if not rows:
        return None
    if name == "loss":
        axes.set_ylabel("loss", **_TEXT)
        if lowest > 0 and highest > 10 * lowest:
            _log_axis(axes, "y")
            axes.set_ylabel("loss, log scale", **_TEXT)
    else:
        _metric_axis(analysis, axes, "y")
    axes.set_xlabel("step", **_TEXT)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: numbers.steps(step)))
    caption = "Mean over the runs counted, band ± 1 sd over seeds."
    if name != "curves":
        caption += " Each run is smoothed over a fortieth of its records."
    if shortened:
        caption += " Dotted: some of the variant's runs have ended."
    if hidden := sum(color == QUIET for color in colors.values()):
        caption += f" In grey, without a band: the {hidden} variants that are neither the first nor among the best."
    _legend(axes)
    return Plot(name, _capital(title), caption, _figure(axes), ["variant", "step", "mean", "sd", "runs"], rows)


def plot_cost(analysis: Analysis, cost: Cost) -> Plot:
    axes = _axes()
    front = sorted((c, v.final.mean) for (v, c), on in zip(cost.points, cost.on_front, strict=True) if on and v.final)
    axes.step(*zip(*front, strict=True), where="post", color=SERIES[1], linewidth=1.2, label="Pareto front")
    rows: list[list[Any]] = []
    for (variant, value), on in zip(cost.points, cost.on_front, strict=True):
        final = variant.final
        assert final is not None
        color = SERIES[1] if on else SERIES[0]
        fill = color if on else "none"
        axes.errorbar(
            value, final.mean, yerr=final.sd, fmt="o", color=color, mfc=fill, ms=5.5, capsize=2.5, linewidth=1.2
        )
        rows.append([variant.name, value, final.mean, final.sd, on])
    _metric_axis(analysis, axes, "y")
    axes.margins(x=0.12, y=0.14)
    units = {
        "weights": numbers.count,
        "compute": lambda value: numbers.quantity(value, "FLOP"),
        "time": numbers.seconds,
    }
    _size_axis(axes, [value for _, value in cost.points], units[cost.name])
    names = {"weights": "weights", "compute": "compute of the run", "time": "training time of the run"}
    axes.set_xlabel(names[cost.name], **_TEXT)
    _label_points(axes, cost)
    title = f"{_capital(analysis.file.metric_label)} against {cost.name}"
    caption = "Filled, and joined by the line: the Pareto front, which no other variant beats. Bars: ± 1 sd over seeds."
    columns = ["variant", {"weights": "weights", "compute": "flops", "time": "seconds"}[cost.name]]
    return Plot(
        f"cost_{cost.name}", title, caption, _figure(axes), [*columns, "mean_final", "sd_final", "on_front"], rows
    )


def plot_scaling(analysis: Analysis, scaling: Scaling, number: int) -> Plot | None:
    if not scaling.values:
        return None
    axes = _axes()
    axes.plot(scaling.sizes, scaling.values, "o", color=SERIES[0], ms=5, alpha=0.55, mew=0, label="runs")
    title = f"{_capital(analysis.scaled)} against {short(scaling.size)}"
    caption = "No fit: fewer than three sizes have a result."
    if scaling.fit is not None:
        sizes = np.geomspace(min(scaling.sizes), max(scaling.sizes), 60)
        centre, low, high = scaling.fit.band(sizes)
        axes.plot(sizes, centre, color=SERIES[1], linewidth=1.6, label="power law")
        axes.fill_between(sizes, low, high, color=SERIES[1], alpha=0.16, linewidth=0)
        caption = f"Exponent {numbers.between(scaling.fit.exponent)}; the band is the 95 % interval of the curve."
        if scaling.fit.bends:
            caption += " The sizes leave the line by more than seeds explain."
        # A wide interval must not push the runs into a corner.
        axes.set_ylim(min(scaling.values) / 2, max(scaling.values) * 2)
    _log_axis(axes, "y")
    _size_axis(axes, scaling.sizes, numbers.count)
    axes.set_xlabel(short(scaling.size), **_TEXT)
    axes.set_ylabel(analysis.scaled, **_TEXT)
    _legend(axes)
    if scaling.group:
        title += f" ({scaling.group})"
    rows = [list(pair) for pair in zip(scaling.sizes, scaling.values, strict=True)]
    return Plot(f"scaling_{number}", title, caption, _figure(axes), [scaling.size, analysis.scaled], rows)


def plot_batch(scaling: BatchScaling, number: int) -> Plot | None:
    if not scaling.steps:
        return None
    axes = _axes()
    axes.plot(scaling.batches, scaling.steps, "o", color=SERIES[0], ms=5, alpha=0.55, mew=0, label="runs")
    caption = "Runs that reached the target."
    if scaling.fit is not None:
        batches = np.geomspace(min(scaling.batches) / 1.2, max(scaling.batches) * 1.2, 80)
        axes.plot(batches, scaling.fit.at(batches), color=SERIES[1], linewidth=1.6, label="S_min (1 + B_crit / batch)")
        if scaling.fit.determined:
            crit = scaling.fit.batch_crit
            axes.axvline(crit.value, color=SERIES[4], linewidth=1.2, linestyle="--", label="B_crit")
            axes.axvspan(crit.low, crit.high, color=SERIES[4], alpha=0.12, linewidth=0)
            axes.set_xlim(min(batches[0], crit.value / 1.3), max(batches[-1], crit.value * 1.3))
            caption += f" B_crit = {numbers.between(crit, 'steps')}: dashed, with its 95 % interval."
        else:
            caption += " B_crit cannot be told from these batch sizes."
    if scaling.num_never:
        caption += f" {scaling.num_never} runs never reached it and are not drawn."
    _log_axis(axes, "y", numbers.count)
    _size_axis(axes, scaling.batches, numbers.count)
    axes.set_xlabel("batch size", **_TEXT)
    axes.set_ylabel("steps to the target", **_TEXT)
    _legend(axes)
    title = "Steps to the target against batch size" + (f" ({scaling.group})" if scaling.group else "")
    rows = [list(pair) for pair in zip(scaling.batches, scaling.steps, strict=True)]
    return Plot(f"critical_batch_{number}", title, caption, _figure(axes), ["batch_size", "steps_to_target"], rows)


def mean_curve(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean, sd (0 for one run) and number of runs. Each run is linear between its records, and has none outside.

    Runs may log at different steps (one that is stopped early ends between two evaluations), so a mean over equal
    steps alone would have points of one run.
    """
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return (np.array([]),) * 4
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    if len(steps) > _GRID_POINTS:
        steps = steps[np.unique(np.linspace(0, len(steps) - 1, _GRID_POINTS).round().astype(int))]
    table = np.stack([np.interp(steps, c.steps, c.values, left=np.nan, right=np.nan) for c in curves])
    count = np.isfinite(table).sum(0)
    mean = np.nansum(table, 0) / count
    squares = np.nansum((table - mean) ** 2, 0)
    return steps, mean, np.sqrt(squares / np.maximum(count - 1, 1)), count


def _smoothed_train(run: RunResult) -> Curve:
    return Curve(run.train_metric.steps, smooth(run.train_metric.values))


def _smoothed_loss(run: RunResult) -> Curve:
    return Curve(run.loss.steps, smooth(run.loss.values))


def _colors(analysis: Analysis) -> dict[str, str]:
    """Of each variant, the same in every figure."""
    names = [variant.name for variant in analysis.variants]
    shown = (
        names if len(names) <= _SHOWN else list(dict.fromkeys([names[0], *(v.name for v in analysis.ranked)]))[:_SHOWN]
    )
    in_order = [name for name in names if name in shown]
    return {name: QUIET for name in names} | dict(zip(in_order, SERIES, strict=False))


def _point_name(variant: Variant) -> str:
    """Of several factors the levels alone: names of keys would leave no room."""
    plain = [str(level) for level in variant.levels.values() if not isinstance(level, dict | list)]
    return ", ".join(plain) if len(plain) > 1 and len(plain) == len(variant.levels) else variant.name


def _label_points(axes: Axes, cost: Cost) -> None:
    """Names beside the points, the front's first; one that would touch another is left out."""
    figure = _figure(axes)
    taken: list[Bbox] = []
    figure.draw_without_rendering()  # the layout is known after it
    points = sorted(zip(cost.points, cost.on_front, strict=True), key=lambda point: not point[1])
    for (variant, value), _ in points:
        assert variant.final is not None
        at = axes.transAxes.inverted().transform(axes.transData.transform((value, variant.final.mean)))
        offset, align = ((-6, 6), "right") if at[0] > 0.5 else ((6, -11), "left")  # clear of the front's steps
        text = axes.annotate(
            _cut(_point_name(variant), 30),
            (value, variant.final.mean),
            offset,
            textcoords="offset points",
            ha=align,
            fontsize=8,
            color=INK,
        )
        box = text.get_window_extent()
        if any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)


def _axes(height: float = _HEIGHT) -> Axes:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes: Axes = figure.subplots()
    axes.set_facecolor("none")
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(which="both", color=AXIS, labelcolor=INK, labelsize=9)
    return axes


def _figure(axes: Axes) -> Figure:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure


def _legend(axes: Axes) -> None:
    """Below the plot, where no curve can run under it."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    columns = max(1, min(3, 56 // (6 + max(map(len, labels)))))
    figure = _figure(axes)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * (-(-len(labels) // columns) - 1))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=8.5, frameon=False, labelcolor=INK
    )


def _metric_axis(analysis: Analysis, axes: Axes, which: str) -> None:
    show, axis = analysis.numbers, axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(nbins=6))
    if show.is_share:
        low, high = axis.get_view_interval()
        digits = 0 if high - low > 0.04 else 2
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.{digits}%}"))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: numbers.tick(value)))
    axis.set_label_text(analysis.file.metric_label, **_TEXT)


def _log_axis(axes: Axes, which: str, show: Callable[[float], str] = numbers.tick) -> None:
    """Log scale with plain numbers; within a decade also at 2 and 5."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axis.set_minor_formatter(NullFormatter())


def _size_axis(axes: Axes, sizes: Sequence[float], show: Callable[[float], str]) -> None:
    """Log scale over the sizes tried, with ticks at them where they are few."""
    found = sorted(set(sizes))
    axes.set_xscale("log")
    if len(found) == 1:
        axes.set_xlim(found[0] / 2, found[0] * 2)
    kept = found[:1]
    span = np.log(found[-1] / found[0]) or 1.0
    longest = max(len(show(size)) for size in found)
    for size in found[1:]:
        if np.log(size / kept[-1]) > 0.02 * (longest + 1) * span:  # labels must not touch
            kept.append(size)
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))


def _cut(text: str, length: int = 40) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
