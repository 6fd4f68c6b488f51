"""What stands on a screen: numbers as people read them, tables and lines that fit it."""

import io
import re
import threading

import pytest
from rich.console import Console, RenderableType

from tinypod.runs import terminal
from tinypod.runs.terminal import Listing, TrainingProgress, amount, dollars, duration, facts, say, size, warn
from tinypod.tasks.task import Metric

EXACT = Metric("exact_accuracy", "exact", "max", ".2%")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0.40 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3 * 3600 + 7 * 60, "3 h 07 min"),
        (52 * 3600, "2 d 04 h"),
    ],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-0.1, "0 s"), (12.34, "12 s"), (59.6, "1 min 00 s"), (245, "4 min 05 s")]
)
def test_durations_of_what_goes_on_are_whole(seconds, text):
    assert duration(seconds, whole=True) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**41, "2,048.00 GiB")]
)
def test_sizes_read_well(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.01234, "0.0123"), (1.2345, "1.23"), (99.95, "100.0"), (31_683.2, "31,683")]
)
def test_amounts_have_three_digits_at_least(value, text):
    assert amount(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "not known"), (0.5, "$0.50"), (99.5, "$99.50"), (1234.5, "$1,234")])
def test_dollars_read_well(value, text):
    assert dollars(value) == text


def shown(what: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def listing(**settings) -> Listing:
    table = Listing("Fruit", ("name", "colour", "grams\na piece", "where it grows"), left=("colour",), **settings)
    table.add_row("apple", "green", "1,234", "in orchards")
    table.add_row("pear", "yellowish", "98", "in gardens")
    return table


def test_a_table_that_fits_stands_in_columns():
    assert [line.split() for line in shown(listing(), 80)[2:]] == [
        ["name", "colour", "a", "piece", "where", "it", "grows"],
        ["─" * 41],
        ["apple", "green", "1,234", "in", "orchards"],
        ["pear", "yellowish", "98", "in", "gardens"],
    ]


@pytest.mark.parametrize("width", [80, 60, 41, 40, 39, 38, 30])
def test_a_table_keeps_its_cells_whole_at_any_width(width):
    lines = shown(listing(), width)
    assert max(map(len, lines)) <= width
    for cell in ("apple", "green", "1,234", "pear", "yellowish", "98", "in gardens"):
        assert any(cell in line for line in lines), (cell, lines)
    assert "…" not in "".join(lines)


def test_a_table_too_wide_has_its_first_cells_above_their_rows():
    lines = shown(listing(), 39)
    assert lines[0] == "Fruit"
    assert [line.split() for line in lines[2:]] == [
        ["colour", "a", "piece", "where", "it", "grows"],
        ["─" * 36],
        ["apple"],
        ["green", "1,234", "in", "orchards"],
        ["pear"],
        ["yellowish", "98", "in", "gardens"],
    ]


def test_one_with_many_columns_is_turned_and_then_stacked():
    table = Listing("", [f"column {number}" for number in range(9)])
    for row in ("a", "b"):
        table.add_row(*(f"{row}{number}" for number in range(9)))
    assert [line.split() for line in shown(table, 40)[::8]] == [
        ["column", "0", "a0", "b0"],
        ["column", "7", "a7", "b7"],
    ]
    assert [line.split() for line in shown(table, 14)[::9]] == [["a0"], ["b0"]]


def test_columns_that_may_go_go_first_and_are_named():
    lines = shown(listing(may_go=("grams\na piece", "where it grows")), 40)
    assert "1,234" not in "".join(lines)
    assert any("in orchards" in line for line in lines)
    assert lines[-1] == "(no room here for: grams a piece)"


def test_facts_are_wrapped_beside_their_names():
    lines = shown(facts([("from", "one two three four five six"), ("path", "/a" * 20)], "title"), 28)
    assert lines[0] == "title"
    assert [line.strip() for line in lines[1:3]] == ["from  one two three four", "five six"]
    assert max(map(len, lines)) <= 28


def screen(width: int, *, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("speak", [say, warn])
def test_sentences_are_wrapped_on_a_terminal_and_whole_in_a_log(speak):
    sentence = "one word after another, " * 9
    on_screen, in_log = screen(60, is_terminal=True), screen(60, is_terminal=False)
    speak(on_screen, sentence)
    speak(in_log, sentence)
    lines = written(on_screen).splitlines()
    assert max(map(len, lines)) <= 60
    assert all(line.rstrip().split()[-1] in ("one", "word", "after", "another,") for line in lines)
    assert len(written(in_log).splitlines()) == 1


def line_of(width: int, phase: str, seconds: float = 0.0, **details: str) -> str:
    progress = TrainingProgress(screen(width, is_terminal=True), 50_000, EXACT, lambda: (phase, seconds))
    for name, text in details.items():
        progress.detail(name, text)
    progress.begin(1_000)
    progress.trained(1_234, {"train/loss": 0.123, "train/exact_accuracy": 0.5, "perf/examples_per_s": 31_683.0})
    progress.evaluated(1_234, {"eval/exact_accuracy": 0.25})
    return progress._line().plain


@pytest.mark.parametrize(
    ("width", "there", "gone"),
    [
        (140, ["loss 0.123", "exact 50.00%", "held-out 25.00%", "31,683 examples/s", "ETA", "━", "─"], []),
        (80, ["loss 0.123", "exact 50.00%", "held-out 25.00%", "ETA"], ["examples/s"]),
        (60, ["loss 0.123", "held-out 25.00%", "ETA"], ["exact 50", "examples/s"]),
        (30, ["ETA"], ["loss", "held-out"]),
    ],
)
def test_the_progress_line_leaves_out_what_matters_least(width, there, gone):
    line = line_of(width, "stepping")
    assert line.startswith("step 1,234/50,000")
    assert len(line) <= width
    assert [text for text in there if text not in line] == []
    assert [text for text in gone if text in line] == []


@pytest.mark.parametrize("width", [80, 60])
def test_the_progress_line_says_what_is_done_instead_of_stepping(width):
    line = line_of(width, "evaluating", 75.0, evaluating="evaluating 512/4,096")
    assert re.match(r"step 1,234/50,000 · \S evaluating 512/4,096 · 1 min 15 s( |$)", line)
    assert len(line) <= width
    assert "waiting for the other processes · 3 s" in line_of(width, "waiting", 3.0)


def test_without_a_terminal_progress_is_whole_lines(monkeypatch):
    monkeypatch.setattr(terminal, "PLAIN_INTERVAL_S", 0.0)
    console = screen(60, is_terminal=False)
    progress = TrainingProgress(console, 2_000, EXACT)
    progress.detail("compiling", "compiling the step")
    progress.begin(0)
    progress.trained(1_000, {"train/loss": 0.123, "train/exact_accuracy": 0.5, "perf/examples_per_s": 1000.0})
    progress.evaluated(2_000, {"eval/exact_accuracy": 0.25})
    first, second, third = written(console).splitlines()
    assert first == "compiling the step"
    assert second == "step 1,000/2,000 · loss 0.123 · exact 50.00% · 1,000 examples/s · ETA 0 s"
    assert third == "step 2,000/2,000 · loss 0.123 · exact 50.00% · held-out 25.00% · 1,000 examples/s"


def test_without_a_terminal_what_takes_long_is_said(monkeypatch):
    monkeypatch.setattr(terminal, "PLAIN_INTERVAL_S", 0.001)
    asked, console = threading.Event(), screen(60, is_terminal=False)

    def doing() -> tuple[str, float]:
        if "saving" in written(console):
            asked.set()
        return "saving", 75.0

    with TrainingProgress(console, 2_000, EXACT, doing):
        assert asked.wait(300)
    assert written(console).splitlines()[0] == "saving · 1 min 15 s"


def test_without_a_terminal_counted_work_is_a_line_now_and_then(monkeypatch):
    """The time left is that of the items since the line before; here the first were there already."""
    clock = iter([0.0, 4.0, 10.0, 12.0, 20.0, 30.0, 45.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    console = screen(60, is_terminal=False)
    with terminal.counting(console, "varying", 2_000) as advance:
        for done in (900, 40, 10, 30, 0, 1_020):  # after 4, 10, 12, 20, 30 and 45 s
            advance(done)
    assert written(console).splitlines() == [
        "varying 940/2,000",
        "varying 980/2,000 · ETA 4 min 15 s",
        "varying 980/2,000",
        "varying 2,000/2,000",
    ]


def test_without_a_terminal_work_of_unknown_length_is_counted(monkeypatch):
    monkeypatch.setattr(terminal, "PLAIN_INTERVAL_S", 0.0)
    console = screen(60, is_terminal=False)
    with terminal.counting(console, "proving", None) as advance:
        advance(1_234)
    assert written(console) == "proving 1,234\n"
