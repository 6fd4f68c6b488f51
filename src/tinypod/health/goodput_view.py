"""How goodput looks on a terminal: one headline, one bar, one table."""

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tinypod.health.goodput import DOWN, LOST, Goodput
from tinypod.runs.terminal import duration, size

_MEANINGS = {
    # kind: colour, its letter in the bar (colours do not reach a log), what it is
    "stepping": ("green", "█", "steps that were kept"),
    "compiling": ("blue", "C", "tracing and compiling"),
    "data": ("cyan", "D", "waiting for data"),
    "waiting": ("bright_magenta", "W", "for other processes"),
    "evaluating": ("magenta", "E", "held-out scores"),
    "saving": ("yellow", "S", "writing checkpoints"),
    "restoring": ("bright_yellow", "R", "reading checkpoints"),
    "starting": ("bright_blue", "s", "before anything else"),
    "closing": ("bright_cyan", "c", "metrics and checkpoints"),
    "ending": ("bright_black", "e", "after everything else"),
    LOST: ("red", "▒", "steps that were done again"),
    DOWN: ("bright_red", "░", "no process was running"),
}
_UNKNOWN = ("white", "?", "")  # of a newer version
_BAR_WIDTH = 78


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
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column()
    for kind in _kinds(goodput):
        colour, cell, meaning = _MEANINGS.get(kind, _UNKNOWN)
        name = Text.assemble((f"{cell} ", colour), kind)
        table.add_row(name, duration(goodput.seconds[kind]), f"{goodput.share(kind):.1%}", Text(meaning, style="dim"))
    return Group(headline, _Bar(goodput), table, *(Text(line, style="dim") for line in _facts(goodput)))


def _kinds(goodput: Goodput) -> list[str]:
    """In the table's order, then any that a newer version knows."""
    return [*(k for k in _MEANINGS if k in goodput.seconds), *(k for k in goodput.seconds if k not in _MEANINGS)]


class _Bar:
    """Each kind ends where the sum of the shares up to it does, so that the bar is always as wide."""

    def __init__(self, goodput: Goodput) -> None:
        self.goodput = goodput

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar, share, width = Text(), 0.0, min(_BAR_WIDTH, options.max_width)
        for kind in _kinds(self.goodput):
            share += self.goodput.share(kind)
            colour, cell, _ = _MEANINGS.get(kind, _UNKNOWN)
            bar.append(cell * (round(share * width) - len(bar)), style=colour)
        yield bar


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
