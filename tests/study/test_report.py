import csv
import html
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from synthetic_study import entry, grid, rising, write_study
from tinypod.study.report import write_report


def one_factor(folder: Path) -> Path:
    factors = {"model.hidden_size": [32, 64, 96]}
    outcomes = {"hidden_size=96,seed=2": {"state": "failed", "reason": "no space left on device", "step": 40}}

    def curve(run: dict[str, Any]) -> Any:
        return rising(1 - 4.0 / run["levels"]["model.hidden_size"] * (1 + 0.05 * run["seed"]))

    return write_study(folder, grid(factors, 3), curve, factors=factors, outcomes=outcomes)


def two_factors(folder: Path) -> Path:
    factors = {"batch_size": [32, 64, 128, 256], "optimizer.kind": ["adamw", "lion"]}

    def curve(run: dict[str, Any]) -> Any:
        return rising(0.9, tau=(30 + 3000 / run["levels"]["batch_size"]) * (1 + 0.05 * run["seed"]))

    return write_study(folder, grid(factors, 2), curve, factors=factors)


def named_variants(folder: Path) -> Path:
    entries = [entry(name, seed) for name in ("paper", "no EMA | raw", "<b>single z</b>") for seed in range(2)]
    return write_study(folder, entries, lambda run: rising(0.6 + 0.01 * run["seed"]), target=None)


def one_seed(folder: Path) -> Path:
    return write_study(folder, [entry("a", 0), entry("b", 0)], lambda run: rising(0.6))


def nothing_yet(folder: Path) -> Path:
    waiting = {"a,seed=0": {"state": "waiting", "step": 0}}
    return write_study(folder, [entry("a", 0)], lambda run: rising(0.6), outcomes=waiting)


def perplexity(folder: Path) -> Path:
    entries = [entry(name, seed) for name in ("a", "b") for seed in range(3)]
    values = {"metric": "eval/perplexity", "direction": "min", "metric_label": "perplexity", "metric_format": ".3f"}
    curve = lambda run: lambda steps: np.array(20 + 100 / steps + run["seed"] + 5 * (run["variant"] == "b"))  # noqa: E731
    return write_study(folder, entries, curve, **values, target=22.0)


SHAPES = [one_factor, two_factors, named_variants, one_seed, nothing_yet, perplexity]


class Page(HTMLParser):
    """What a page asks for from outside, and whether its tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_study_has_a_whole_report(tmp_path: Path, shape: Any) -> None:
    shape(tmp_path)
    output = io.StringIO()
    path = write_report(tmp_path, Console(file=output, width=200))
    assert path == tmp_path / "report" / "report.html"
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)  # offline: all of it is in the page
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    files = {file.name for file in path.parent.iterdir()}
    assert {link for link in page.links if not link.startswith("#")} <= files
    assert {"report.html", "report.md", "runs.csv"} <= files
    figures = {file.removesuffix(".png") for file in files if file.endswith(".png")}
    assert len(figures) == page.tags.count("figure") == page.tags.count("svg")
    assert all(f"{name}.csv" in files and f'id="figure-{name}"' in text for name in figures)
    assert bool(figures) == (shape is not nothing_yet)
    assert not {"nan", "inf", "None"} & set(
        re.findall(r"\w+", re.sub(r"<style.*?</style>|<svg.*?</svg>", "", text, flags=re.S))
    )
    for line in output.getvalue().splitlines()[:-1]:  # what the terminal says, the page and the Markdown say too
        assert html.escape(line) in text
        assert line.replace("|", "\\|").replace("<", "&lt;") in (path.parent / "report.md").read_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the study of one factor."""
    return write_report(one_factor(tmp_path_factory.mktemp("study")), Console(quiet=True))


def test_the_answers_are_in_the_page(report: Path) -> None:
    text = html.unescape(report.read_text())
    assert "Differences to hidden_size=32" in text
    assert "Welch's t intervals at 95 %" in text
    assert "Power laws" in text
    assert "Time to 50.00% exact" in text
    assert "no space left on device" in text
    assert "left out of the means" in text
    assert "2 of 3" in text


def test_the_critical_batch_is_in_the_page_for_each_of_the_other_factor(tmp_path: Path) -> None:
    path = write_report(two_factors(tmp_path), Console(quiet=True))
    text = path.read_text()
    assert "Critical batch size for kind=adamw" in text
    assert "Critical batch size for kind=lion" in text
    assert (path.parent / "critical_batch_2.png").exists()


def test_names_are_text(tmp_path: Path) -> None:
    path = write_report(named_variants(tmp_path), Console(quiet=True))
    text, markdown = path.read_text(), (path.parent / "report.md").read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;single z&lt;/b&gt;" in text
    assert "<b>" not in markdown
    assert "no EMA \\| raw" in markdown
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in markdown.splitlines() if line.startswith("| paper")}
    assert widths == {5, 7}  # results and gap have four columns, runs have six
    assert "No target is set" in text


def test_every_run_is_in_the_csv(report: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((report.parent / "runs.csv").read_text())))
    assert len(rows) == 9
    assert [row["counts"] for row in rows] == ["True"] * 8 + ["False"]
    assert rows[0]["model.hidden_size"] == "32"
    assert float(rows[0]["final"]) == pytest.approx((1 - 4 / 32) * (1 - np.exp(-5)))
    assert float(rows[0]["seconds"]) == pytest.approx(15.0)
    assert rows[-1]["reason"] == "no space left on device"


def test_a_second_report_leaves_no_figure_of_the_first(tmp_path: Path) -> None:
    path = write_report(one_factor(tmp_path), Console(quiet=True))
    notes = path.parent / "my_notes.csv"
    notes.write_text("mine")
    assert (path.parent / "scaling_1.png").exists()
    named_variants(tmp_path)
    write_report(tmp_path, Console(quiet=True))
    assert not list(path.parent.glob("scaling_*"))
    assert notes.read_text() == "mine"


def test_the_same_study_makes_the_same_page(report: Path) -> None:
    first = report.read_bytes()
    assert write_report(report.parents[1], Console(quiet=True)).read_bytes() == first
