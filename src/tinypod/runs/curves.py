"""Pictures of the curves of a run, or of several together, from `metrics.jsonl`.

The figure is built on the object API with the Agg canvas: no pyplot, so no global state and no display.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tinypod.runs.headline import Metric
from tinypod.runs.metrics import MetricsLog, Record
from tinypod.runs.terminal import shorten

_TRAIN, _EVAL, _INK = "#2a78b5", "#d1495b", "#3a3f45"
_SMOOTHING_WINDOWS = 40  # one smoothed point sees about a fortieth of the run
_VALUE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9, "fontweight": "bold"}
# Below the plot, where no curve can run under it.
_LEGEND: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 4, "fontsize": 9}
_LEGEND |= {"frameon": False, "labelcolor": _INK}


def plot_curves(run_dir: Path, headline: Sequence[Metric]) -> Path | None:
    """The loss and the first headline metrics over steps, to `run_dir/curves.png`. None: the log is empty."""
    records = MetricsLog(run_dir).read()
    if not records:
        return None
    figure, left, right = _two_plots()
    _draw_loss(left, records)
    _draw_headline(right, records, headline)
    for axes in (left, right):
        _dress(axes, max(record["step"] for record in records))
    figure.suptitle(run_dir.resolve().name, fontsize=13, fontweight="bold", color=_INK)
    return _save(figure, run_dir / "curves.png")


def plot_together(path: Path, runs: Mapping[str, list[Record]], metric: Metric | None) -> Path | None:
    """Training loss and a held-out metric of runs by name, over steps. None: all logs are empty."""
    if not any(runs.values()):
        return None
    figure, left, right = _two_plots()
    losses = []
    for number, (name, records) in enumerate(runs.items()):
        style: dict[str, Any] = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
        steps, loss = _column(records, "train/loss")
        losses.append(loss)
        style |= {"linewidth": 1.8, "ms": 3.5, "label": shorten(name, 50)}
        left.plot(steps, smooth(loss), marker=_marker(steps), **style)
        if metric is not None:
            steps, values = _column(records, f"eval/{metric.name}")
            right.plot(steps, values, marker=_marker(steps), **style)
    left.set_title("Training loss, smoothed", loc="left", fontsize=11, color=_INK)
    _scale_loss(left, np.concatenate(losses))
    right.set_title(f"Held-out {metric.label}" if metric else "Held out", loc="left", fontsize=11, color=_INK)
    if metric is not None and metric.format.endswith("%"):
        _scale_share(right)
    for axes in (left, right):
        if not any(len(line.get_xdata()) for line in axes.lines):  # type: ignore[arg-type]
            _say_nothing_logged(axes)
        _dress(axes, max(record["step"] for records in runs.values() for record in records))
    figure.legend(handles=left.lines, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return _save(figure, path)


def _two_plots() -> tuple[Figure, Axes, Axes]:
    figure = Figure(figsize=(12, 4.9), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    return figure, left, right


def _save(figure: Figure, path: Path) -> Path:
    temporary = path.with_name(f".{path.stem}.tmp.png")  # a viewer never sees half a picture
    figure.savefig(temporary)
    temporary.replace(path)
    return path


def _column(records: list[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps and values of one metric where it was logged and finite."""
    pairs = [(record["step"], record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def smooth(values: np.ndarray) -> np.ndarray:
    """A centred mean; the window shrinks at the ends, so that the curve ends where the data end."""
    half = len(values) // _SMOOTHING_WINDOWS // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)


def _draw_loss(axes: Axes, records: list[Record]) -> None:
    axes.set_title("Training loss", loc="left", fontsize=11, color=_INK)
    steps, loss = _column(records, "train/loss")
    if not len(loss):
        _say_nothing_logged(axes)
        return
    smoothed = smooth(loss)
    axes.plot(steps, loss, color=_TRAIN, alpha=0.28, linewidth=0.9, label="as logged")
    axes.plot(steps, smoothed, color=_TRAIN, linewidth=2.0, label="smoothed", marker=_marker(steps), ms=3.5)
    axes.annotate(f"{smoothed[-1]:.3g}", (steps[-1], smoothed[-1]), (5, 0), **_VALUE, color=_TRAIN)
    _scale_loss(axes, loss)
    if broken := sum("train/loss" in record for record in records) - len(loss):
        axes.plot([], [], " ", label=f"{broken} not finite, not drawn")
    axes.legend(**_LEGEND)


def _scale_loss(axes: Axes, loss: np.ndarray) -> None:
    """Logarithmic where it spans more than a decade."""
    axes.set_ylabel("loss", color=_INK)
    if len(loss) and loss.min() > 0 and loss.max() > 10 * loss.min():
        axes.set_yscale("log", subs=[2, 5])
        axes.set_ylabel("loss, log scale", color=_INK)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _scale_share(axes: Axes) -> None:
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))


def _draw_headline(axes: Axes, records: list[Record], headline: Sequence[Metric]) -> None:
    """The metrics that are written like the first, at most two: they share an axis."""
    first = headline[0]
    shown = [metric for metric in headline if metric.format[-1] == first.format[-1]][:2]
    axes.set_title(" and ".join(metric.label for metric in shown).capitalize(), loc="left", fontsize=11, color=_INK)
    if first.format.endswith("%"):
        _scale_share(axes)
    for split, color in (("eval", _EVAL), ("train", _TRAIN)):
        for metric, style, width in zip(shown, ("-", "--"), (2.0, 1.2), strict=False):
            steps, values = _column(records, f"{split}/{metric.name}")
            if not len(values):
                continue
            if split == "train":
                axes.plot(steps, values, color=color, alpha=0.15, linewidth=0.8)
                values = smooth(values)
            label, marker = f"{split}, {metric.label}", _marker(steps)
            axes.plot(steps, values, style, color=color, linewidth=width, label=label, marker=marker, ms=3.5)
            if split == "eval" and metric is first:
                axes.annotate(metric.show(values[-1]), (steps[-1], values[-1]), (5, 0), **_VALUE, color=color)
    if axes.lines:
        axes.legend(**_LEGEND)
    else:
        _say_nothing_logged(axes)


def _marker(steps: np.ndarray) -> str:
    return "o" if len(steps) <= 40 else ""  # a single point has no line to be seen by


def _say_nothing_logged(axes: Axes) -> None:
    axes.text(0.5, 0.5, "nothing logged yet", transform=axes.transAxes, ha="center", va="center", color="#9aa0a6")


def _dress(axes: Axes, last_step: float) -> None:
    axes.set_xlabel("step", color=_INK)
    axes.set_xlim(0, max(1.0, last_step) * 1.1)  # room for the last value beside its curve
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.grid(True, color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bec6")
    axes.tick_params(which="both", colors=_INK, labelsize=9)
