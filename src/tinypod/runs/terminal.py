"""What a person sees while something runs: a live line on a terminal, plain lines now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_INTERVAL_S = 10.0  # between lines where there is no terminal


def say(console: Console, text: str, style: str = "") -> None:
    """Text as it is: a folder's name may hold what rich takes for markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def warn(console: Console, text: str) -> None:
    console.print("[yellow]warning:[/] ", end="")
    say(console, text)


class TrainingProgress:
    """One line: step, loss, the headline metric (tasks.task.Metric) in training and held out, speed, time left."""

    def __init__(self, console: Console, start: int, total: int, metric: Any) -> None:
        self.console, self.start, self.total, self.metric = console, start, total, metric
        self._texts = {"loss": "", "train": "", "speed": "", "held_out": ""}
        self._began = self._said = time.monotonic()
        self._live: Progress | None = None
        if console.is_terminal:
            line, eta = TextColumn("{task.fields[line]}"), TextColumn("· ETA")
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), line, eta, TimeRemainingColumn())
            self._live = Progress(*columns, console=console)
            self._task = self._live.add_task("", total=total, completed=start, line="")

    def __enter__(self) -> "TrainingProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, step: int) -> None:
        if self._live is not None:
            self._live.update(self._task, completed=step)

    def trained(self, step: int, record: dict[str, float]) -> None:
        self._texts["loss"] = f"loss {record['train/loss']:.3f}"
        if (value := record.get(f"train/{self.metric.name}")) is not None and self.metric.name != "loss":
            self._texts["train"] = f"{self.metric.label} {self.metric.show(value)}"
        if "perf/examples_per_s" in record:
            self._texts["speed"] = f"{record['perf/examples_per_s']:,.0f} examples/s"
        self._show(step, now=False)

    def evaluated(self, step: int, record: dict[str, float]) -> None:
        self._texts["held_out"] = f"held-out {self.metric.show(record[f'eval/{self.metric.name}'])}"
        self._show(step, now=True)

    def _show(self, step: int, now: bool) -> None:
        line = " · ".join(text for text in self._texts.values() if text)
        if self._live is not None:
            self._live.update(self._task, completed=step, line=line)
            return
        clock = time.monotonic()
        if now or clock - self._said >= PLAIN_INTERVAL_S:
            self._said = clock
            left = (clock - self._began) / max(step - self.start, 1) * (self.total - step)
            say(self.console, f"step {step}/{self.total} · {line} · ETA {timedelta(seconds=round(left))}")


@contextmanager
def counting(console: Console, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar for work counted in items; yields a function to call with the items done since the last call."""
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task(what, total=total)
        yield lambda done: live.advance(task, done)


def duration(seconds: float) -> str:
    """`0.42 s`, `12.3 s`, `4 min 05 s`, `3 h 07 min`, `2 d 04 h`."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
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
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} GiB"
