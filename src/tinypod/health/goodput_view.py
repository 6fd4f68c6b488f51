"""How goodput looks on a terminal: one headline, one bar, one table."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinypod.health.goodput import DOWN, LOST, Goodput
from tinypod.runs.terminal import duration, size

_MEANINGS = {
    # kind: colour, what it is
    "stepping": ("green", "training steps that were kept"),
    "compiling": ("blue", "tracing and compiling"),
    "data": ("cyan", "waiting for data"),
    "waiting": ("bright_magenta", "waiting for other processes"),
    "evaluating": ("magenta", "evaluating"),
    "saving": ("yellow", "writing checkpoints"),
    "restoring": ("bright_yellow", "reading checkpoints"),
    "starting": ("bright_blue", "starting"),
    "closing": ("bright_cyan", "closing metrics and checkpoints"),
    "ending": ("bright_black", "ending"),
    LOST: ("red", "steps done again after a restart or rollback"),
    DOWN: ("bright_red", "no process, between a crash or preemption and the next start"),
}
_UNKNOWN = ("white", "")  # of a newer version
_BAR_WIDTH = 78
_CELLS = {"stepping": "█", LOST: "▒", DOWN: "░"}


def render(goodput: Goodput) -> RenderableType:
    if goodput.unreadable is not None:
        return Text(f"goodput unknown: {goodput.unreadable}", style="yellow")
    if goodput.total_s <= 0:
        return Text("goodput: nothing recorded yet", style="dim")
    tries = f"{goodput.attempts} attempt{'s' if goodput.attempts != 1 else ''}"
    headline = Text.assemble(
        ("goodput ", ""), (f"{goodput.goodput:.1%}", "bold green"), f" of {duration(goodput.total_s)} in {tries}"
    )
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify)
    for kind in _kinds(goodput):
        colour, meaning = _MEANINGS.get(kind, _UNKNOWN)
        name = Text.assemble((f"{_CELLS.get(kind, '▓')} ", colour), kind)
        table.add_row(name, duration(goodput.seconds[kind]), f"{goodput.share(kind):.1%}", Text(meaning, style="dim"))
    return Group(headline, _bar(goodput), table, *(Text(line, style="dim") for line in _facts(goodput)))


def _kinds(goodput: Goodput) -> list[str]:
    """In the table's order, then any that a newer version knows."""
    return [*(k for k in _MEANINGS if k in goodput.seconds), *(k for k in goodput.seconds if k not in _MEANINGS)]


def _bar(goodput: Goodput) -> Text:
    """Each kind ends where the sum of the shares up to it does, so that the bar is always as wide."""
    bar, share = Text(), 0.0
    for kind in _kinds(goodput):
        share += goodput.share(kind)
        cell = _CELLS.get(kind, "▓")  # distinct in a log without colours, too
        bar.append(cell * (round(share * _BAR_WIDTH) - len(bar)), style=_MEANINGS.get(kind, _UNKNOWN)[0])
    return bar


def _facts(goodput: Goodput) -> list[str]:
    lines = []
    if goodput.lost_steps:
        back = f", {goodput.rollbacks} rollbacks" if goodput.rollbacks else ""
        lines.append(f"{goodput.lost_steps:,} steps lost{back}")
    if goodput.compiles:
        hits = f", {goodput.cache_hits} of them from the cache" if goodput.cache_hits else ""
        lines.append(f"XLA: {goodput.compiles:,} compiles in {duration(goodput.compile_s)}{hits}")
    if goodput.step_bytes is not None:
        lines.append(f"memory: the step needs {size(goodput.step_bytes)} per device")
    if goodput.peak_bytes is not None:
        lines.append(f"memory: the fullest device reached {size(goodput.peak_bytes)}")
    if goodput.hardware is not None:
        lines.append(f"on {goodput.hardware}")
    return lines
