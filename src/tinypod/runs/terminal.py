"""What a person sees: tables and lines that fit 80 columns and fewer, a live line while something runs, and how numbers
are written.

A terminal is never left to break a line or a cell by itself: sentences are wrapped between words, tables leave columns
out or stack their rows, the live line leaves out what matters least. Where there is no terminal, sentences are whole
lines, and progress is a plain line now and then, without control characters.
"""

import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

PLAIN_INTERVAL_S = 10.0  # between lines where there is no terminal
REFRESH_PER_S = 8.0
_SHORTEST_BAR, _LONGEST_BAR = 8, 40
_BETWEEN = 2  # columns of a table
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# What the live line calls the phases of health.watch, unless it was told more of them.
_PHASES = {
    "starting": "starting",
    "data": "reading the data",
    "restoring": "looking for a checkpoint",
    "compiling": "compiling",
    "waiting": "waiting for the other processes",
    "closing": "closing the logs",
    "ending": "ending",
}


def say(console: Console, text: str, style: str = "") -> None:
    """Text as it is: a folder's name may hold what rich takes for markup."""
    _print(console, Text(text, style))


def warn(console: Console, text: str) -> None:
    _print(console, Text.assemble(("warning: ", "yellow"), text))


def fail(console: Console, text: str) -> None:
    _print(console, Text.assemble(("error: ", "bold red"), text))


def _print(console: Console, text: Text) -> None:
    """Broken between words where a terminal would break it anywhere; not within words, as a path is there to be copied.
    A log keeps a sentence in one line."""
    if console.is_terminal:
        wrapper = textwrap.TextWrapper(console.width, break_long_words=False, break_on_hyphens=False)
        broken = "\n".join(wrapper.fill(line) for line in text.plain.split("\n"))
        text = Text(broken, text.style, spans=text.spans)
    console.print(text, soft_wrap=True)


class Listing:
    """A table whose cells stay whole at any width. Where it is too wide, the columns that `may_go` go, in their order.
    Else each row's first cell gets a line of its own, or rows become columns, or each row a block of lines: the first
    of these that fits. A header may have two lines."""

    def __init__(
        self,
        title: str,
        columns: Sequence[str],
        *,
        left: Collection[str] = (),
        may_go: Sequence[str] = (),
    ) -> None:
        """`left`: columns of words besides the first one."""
        self.title, self.columns, self.left, self.may_go = title, list(columns), left, may_go
        self.rows: list[list[str | Text]] = []
        self._sections: set[int] = set()

    def add_row(self, *cells: str | Text, end_section: bool = False) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(list(cells))
        if end_section:
            self._sections.add(len(self.rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="bold")
        for count in range(len(self.may_go) + 1):
            gone = self.may_go[:count]
            shown = [column for column, name in enumerate(self.columns) if name not in gone]
            if _fits([self._width(column) for column in shown], options.max_width):
                yield self._table(shown)
                if gone:
                    yield Text(f"(no room here for: {', '.join(map(_in_one_line, gone))})", style="dim")
                return
        heads = _widest(row[0] for row in self.rows)
        under = [self._width(column) for column in range(1, len(self.columns))]
        in_lines = all("\n" not in str(cell) for row in self.rows for cell in row)
        if in_lines and heads <= options.max_width and _fits(under, options.max_width - _BETWEEN):
            yield from self._headed(under)
            return
        if _fits([_widest(map(_in_one_line, self.columns)), *map(_widest, self.rows)], options.max_width):
            yield self._transposed()
            return
        for row in self.rows:
            yield _text(row[0], "bold")
            yield facts(list(zip(map(_in_one_line, self.columns[1:]), row[1:], strict=True)), indent=2)

    def _headed(self, widths: Sequence[int]) -> Iterator[Text]:
        """Each row under its first cell, in columns all the same."""
        headers = [name.split("\n") for name in self.columns[1:]]
        deepest = max(map(len, headers))
        for depth in range(deepest):
            yield self._under([([""] * (deepest - len(name)) + name)[depth] for name in headers], widths)
        yield Text("─" * (sum(widths) + _BETWEEN * len(widths)))
        for row in self.rows:
            yield _text(row[0])
            yield self._under(row[1:], widths)

    def _under(self, cells: Sequence[str | Text], widths: Sequence[int]) -> Text:
        line = Text()
        for name, cell, width in zip(self.columns[1:], cells, widths, strict=True):
            blank = " " * (width - cell_len(str(cell)))
            line += Text(" " * _BETWEEN) + (_text(cell) + blank if name in self.left else Text(blank) + _text(cell))
        return line

    def _transposed(self) -> Table:
        table = _plain_table()
        table.add_column(_in_one_line(self.columns[0]), no_wrap=True)
        for row in self.rows:
            table.add_column(_text(row[0]), no_wrap=True, justify="right" if len(self.rows) > 1 else "left")
        for column, name in enumerate(self.columns[1:], 1):
            table.add_row(_in_one_line(name), *(_text(row[column]) for row in self.rows))
        return table

    def _width(self, column: int) -> int:
        return _widest([self.columns[column], *(row[column] for row in self.rows)])

    def _table(self, columns: Sequence[int]) -> Table:
        table = _plain_table()
        for column in columns:
            justify: Any = "left" if column == 0 or self.columns[column] in self.left else "right"
            table.add_column(self.columns[column], justify=justify, no_wrap=True)
        for number, row in enumerate(self.rows):
            table.add_row(*(_text(row[column]) for column in columns), end_section=number in self._sections)
        return table


def _widest(cells: Iterable[str | Text]) -> int:
    return max((cell_len(line) for cell in cells for line in str(cell).split("\n")), default=0)


def _fits(widths: Sequence[int], width: int) -> bool:
    return sum(widths) + _BETWEEN * (len(widths) - 1) <= width


def _plain_table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _BETWEEN - 1, 0, 0), header_style="bold"
    )


def facts(pairs: Sequence[tuple[str, str | Text]], title: str = "", indent: int = 0) -> RenderableType:
    """Names, and beside them what they are."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _BETWEEN, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(" " * indent + name, _text(value))
    return Group(Text(title, style="bold"), table) if title else table


def _text(cell: str | Text, style: str = "") -> Text:
    return cell if isinstance(cell, Text) else Text(cell, style)


def _in_one_line(name: str) -> str:
    return name.replace("\n", " ")


class TrainingProgress:
    """One line: step, loss, the headline metric (tasks.task.Metric) in training and held out, speed, time left; and
    what is being done where that is not stepping.

    `doing` says which phase it is and for how many seconds. The line is drawn by a thread: it moves while the loop
    waits for a compiler.
    """

    def __init__(
        self,
        console: Console,
        total: int,
        metric: Any,
        doing: Callable[[], tuple[str, float]] = lambda: ("stepping", 0.0),
    ) -> None:
        self.console, self.total, self.metric, self.doing = console, total, metric, doing
        self._texts = {"loss": "", "train": "", "held_out": "", "speed": ""}
        self._details: dict[str, str] = {}
        self._start, self._step, self._began = 0, 0, time.monotonic()
        self._said, self._over = time.monotonic(), threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=self._line, console=console, refresh_per_second=REFRESH_PER_S)

    def __enter__(self) -> "TrainingProgress":
        if self._live is not None:
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._keep_saying, name="tinypod-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._live is not None:
            self._live.transient = self._step == self._start  # without a step there is nothing to leave behind
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def begin(self, step: int) -> None:
        """The first step comes now; what came before it says nothing about the time left."""
        self._start = self._step = step
        self._began = self._said = time.monotonic()

    def detail(self, phase: str, text: str) -> None:
        """What to call a phase from now on."""
        self._details[phase] = text
        if self._live is None and phase == "compiling":  # may take minutes
            say(self.console, text)

    def step(self, step: int) -> None:
        self._step = step

    def trained(self, step: int, record: dict[str, float]) -> None:
        self._texts["loss"] = f"loss {record['train/loss']:.3f}"
        if (value := record.get(f"train/{self.metric.name}")) is not None and self.metric.name != "loss":
            self._texts["train"] = f"{self.metric.label} {self.metric.show(value)}"
        if "perf/examples_per_s" in record:
            self._texts["speed"] = f"{amount(record['perf/examples_per_s'])} examples/s"
        self._step = max(self._step, step)  # the steps after it may be under way already
        self._say(now=False)

    def evaluated(self, step: int, record: dict[str, float]) -> None:
        self._texts["held_out"] = f"held-out {self.metric.show(record[f'eval/{self.metric.name}'])}"
        self._step = step
        self._say(now=True)

    def _left(self) -> str:
        done = self._step - self._start
        if done <= 0 or self._step >= self.total:
            return ""
        seconds = (time.monotonic() - self._began) / done * (self.total - self._step)
        return f"ETA {duration(seconds, whole=True)}"

    def _say(self, *, now: bool) -> None:
        clock = time.monotonic()
        if self._live is None and (now or clock - self._said >= PLAIN_INTERVAL_S):
            self._said = clock
            texts = [f"step {self._step:,}/{self.total:,}", *self._texts.values(), self._left()]
            say(self.console, " · ".join(filter(None, texts)))

    def _keep_saying(self) -> None:
        """Without a terminal: what takes long."""
        while not self._over.wait(PLAIN_INTERVAL_S):
            phase, seconds = self.doing()
            if phase != "stepping" and seconds >= PLAIN_INTERVAL_S:
                say(self.console, f"{self._called(phase)} · {duration(seconds, whole=True)}")

    def _called(self, phase: str) -> str:
        return self._details.get(phase) or _PHASES.get(phase, phase)

    def _line(self) -> Text:
        """What matters most, as far as there is room; a bar in the rest of it."""
        phase, seconds = ("stepping", 0.0) if self._over.is_set() else self.doing()
        stepping, began = phase == "stepping", self._step > 0 or phase == "stepping"
        step = f"step {self._step:,}/{self.total:,}" if began else ""
        moving = "" if stepping else f"{self._frame()} {self._called(phase)} · {duration(seconds, whole=True)}"
        left = self._left() if stepping else ""
        values = self._texts
        chosen, room = [step, moving], self.console.width - len(step) - len(moving) - (3 if step and moving else 0)
        wanted = (left, values["held_out"], values["loss"], values["train"], values["speed"])
        for text in filter(None, wanted):  # by importance
            if len(text) + 3 > room:
                break
            chosen.append(text)
            room -= len(text) + 3
        ordered = [text for text in (moving, *values.values(), left) if text and text in chosen]
        bar, width = Text(), min(room - 1, _LONGEST_BAR)
        if stepping and width >= _SHORTEST_BAR:
            done = round(width * min(1.0, self._step / max(self.total, 1)))
            bar = Text.assemble(" ", ("━" * done, "green"), ("─" * (width - done), "dim"))
        parts = [Text(step) + bar if step else Text(), *map(Text, ordered)]
        return _cropped(Text(" · ").join(part for part in parts if part.plain))

    def _frame(self) -> str:
        return _SPINNER[int(time.monotonic() * REFRESH_PER_S) % len(_SPINNER)]


def _cropped(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


class _TimeLeft(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.time_remaining is None else f"ETA {duration(task.time_remaining, whole=True)}")


class _Counted(MofNCompleteColumn):
    def render(self, task: Task) -> Text:
        total = "?" if task.total is None else f"{int(task.total):,}"
        return Text(f"{int(task.completed):,}/{total}")


@contextmanager
def counting(console: Console, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar for work counted in items, or a line now and then; yields a function to call with the items done since the
    last call."""
    if not console.is_terminal:
        yield _lines(console, what, total)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), _Counted(), _TimeLeft())
    with Progress(*columns, console=console, transient=True, expand=console.width <= 100) as live:
        task = live.add_task(what, total=total)
        yield lambda done: live.advance(task, done)


def _lines(console: Console, what: str, total: int | None) -> Callable[[int], None]:
    """What `counting` says where there is no terminal: of work that is soon over nothing. The time left goes by what
    was done since the line before, as the first items may have been there already, or have waited for a compiler."""
    said, before, completed, first = time.monotonic(), 0, 0, True

    def advance(done: int) -> None:
        nonlocal said, before, completed, first
        completed, clock = completed + done, time.monotonic()
        if clock - said < PLAIN_INTERVAL_S:
            return
        text, new = f"{what} {completed:,}", completed - before
        if total is not None:
            text += f"/{total:,}"
            if new and not first and completed < total:
                text += f" · ETA {duration((clock - said) / new * (total - completed), whole=True)}"
        say(console, text)
        said, before, first = clock, completed, False

    return advance


def duration(seconds: float, *, whole: bool = False) -> str:
    """`0.42 s`, `12.3 s`, `4 min 05 s`, `3 h 07 min`, `2 d 04 h`; `whole`: `12 s`, for what goes on."""
    if seconds < (59.5 if whole else 59.95):
        return f"{max(0.0, seconds):.0f} s" if whole else f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 24 else f"{hours // 24} d {hours % 24:02d} h"


def short_duration(seconds: float) -> str:
    """Two or three digits and a unit: `7 s`, `12 min`, `3.5 h`, `2.1 d`."""
    for size, unit, digits in ((60.0, "s", 0), (60.0, "min", 0), (24.0, "h", 1)):
        if seconds < size:
            return f"{max(0.0, seconds):.{digits}f} {unit}"
        seconds /= size
    return f"{seconds:.1f} d"


def shorten(text: str, width: int) -> str:
    """Without its middle, where it is longer: names of runs differ at their ends."""
    if len(text) <= width:
        return text
    end = width // 2
    return f"{text[: width - end - 1]}…{text[-end:]}"


def size(size_bytes: float) -> str:
    """`512 B`, `1.5 KiB`, `3.0 MiB`, `2,048.00 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.2f} GiB"


def amount(value: float) -> str:
    """Three significant digits at least: `0.0123`, `1.23`, `12.3`, `1,234`."""
    if value == 0 or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    digits = max(0, 2 - int(f"{value:e}".partition("e")[2]))
    return f"{value:,.{digits}f}"


def dollars(value: float | None) -> str:
    return "not known" if value is None else f"${value:,.0f}" if value >= 100 else f"${value:,.2f}"
