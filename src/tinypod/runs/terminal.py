"""What a person sees while something runs: a live line on a terminal, plain lines now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_INTERVAL_S = 10.0  # between lines where there is no terminal


def say(console: Console, text: str, style: str = "") -> None:
    """A line as it is: names of files and what others wrote may hold `[`, which rich would take for markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class TrainingProgress:
    """One line: step, loss, exact accuracy, examples a second, time left."""

    def __init__(self, console: Console, start: int, total: int) -> None:
        self.console, self.start, self.total = console, start, total
        self._texts = {"loss": "", "exact": "", "speed": "", "held_out": ""}
        self._began = self._said = time.monotonic()
        self._live: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[line]}"),
            )
            self._live = Progress(*columns, TextColumn("· ETA"), TimeRemainingColumn(), console=console)
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

    def trained(self, step: int, row: dict[str, float]) -> None:
        self._texts["loss"] = f"loss {row['train/loss']:.3f}"
        if "train/exact_accuracy" in row:
            self._texts["exact"] = f"exact {row['train/exact_accuracy']:.1%}"
        if "perf/examples_per_s" in row:
            self._texts["speed"] = f"{row['perf/examples_per_s']:,.0f} examples/s"
        self._show(step, now=False)

    def evaluated(self, step: int, row: dict[str, float]) -> None:
        self._texts["held_out"] = f"held-out {row['eval/exact_accuracy']:.1%}"
        self._show(step, now=True)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _show(self, step: int, now: bool) -> None:
        line = " · ".join(text for text in self._texts.values() if text)
        if self._live is not None:
            self._live.update(self._task, completed=step, line=line)
            return
        clock = time.monotonic()
        if now or clock - self._said >= PLAIN_INTERVAL_S:
            self._said = clock
            left = (clock - self._began) / max(step - self.start, 1) * (self.total - step)
            self.say(f"step {step}/{self.total} · {line} · ETA {timedelta(seconds=round(left))}")


@contextmanager
def counting(console: Console, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar for work counted in items; yields a function to call with the items done since the last call."""
    if not console.is_terminal:
        yield lambda done: None
        return
    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as live:
        task = live.add_task(what, total=total)
        yield lambda done: live.advance(task, done)
