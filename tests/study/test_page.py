"""The page in a real browser: headless Chromium, where there is one."""

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

import chromium
from synthetic_study import grid, rising, write_study
from tinypod.study.report import write_report

HEIGHT = 6000  # pixels: the whole page

pytestmark = pytest.mark.slow

MEASURE = """(() => {
  const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.width, r.height] }
  const figures = [...document.querySelectorAll("figure")]
  const texts = figures.flatMap(figure => [...figure.querySelectorAll("svg text")].map(text => ({
    name: figure.id, text: text.textContent, box: box(text), svg: box(figure.querySelector("svg")),
    size: parseFloat(getComputedStyle(text).fontSize) * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)})))
  return {
    width: innerWidth, content: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.querySelector("figure svg text")).fill,
    figures: Object.fromEntries(figures.map(figure => [figure.id, box(figure.querySelector("svg"))])),
    tables: [...document.querySelectorAll(".scroll")].map(box), texts}
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    if why := chromium.why_not():
        pytest.skip(why)
    with chromium.Browser(tmp_path_factory.mktemp("chromium") / "profile") as browser:
        yield browser


def show(browser: chromium.Browser, page: Path, width: int, *, dark: bool = False) -> chromium.Page:
    shown = browser.open(width, HEIGHT, dark=dark)
    shown.go(page.as_uri())
    assert shown.requests == [page.as_uri()]  # it fetches nothing
    assert shown.errors == []
    return shown


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    factors = {"model.hidden_size": [32, 64, 96, 128], "optimizer.learning_rate": [1e-3, 4e-3]}

    def curve(run: dict[str, Any]) -> Any:
        levels, noise = run["levels"], 1 + 0.05 * run["seed"]
        return rising(1 - 40 * levels["optimizer.learning_rate"] ** 0.5 * noise / levels["model.hidden_size"])

    entries = grid(factors, 3)
    outcomes = {entries[0]["name"]: {"state": "diverged", "reason": "loss not finite", "step": 60}}
    folder = tmp_path_factory.mktemp("study")
    write_study(folder, entries, curve, factors=factors, outcomes=outcomes)
    return write_report(folder, Console(quiet=True))


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits_a_phone_and_a_desk(browser: chromium.Browser, page: Path, width: int) -> None:
    found = show(browser, page, width).run(MEASURE)
    assert found["width"] == width
    assert found["content"] <= width  # wide tables scroll inside themselves
    expected = {f"figure-{file.stem}" for file in page.parent.glob("*.png")}
    assert expected == set(found["figures"])
    assert len(expected) >= 8
    for left, _, wide, high in found["figures"].values():
        assert wide > 280
        assert high > 120
        assert left >= 0
        assert left + wide <= width
    for text in found["texts"]:  # letters that can be read, and that no edge cuts
        assert text["size"] >= 7, text
        left, top, wide, high = text["box"]
        x, y, whole_wide, whole_high = text["svg"]
        assert x - 1 <= left, text
        assert left + wide <= x + whole_wide + 1, text
        assert y - 1 <= top, text
        assert top + high <= y + whole_high + 1, text


def test_the_page_is_dark_where_the_reader_is(browser: chromium.Browser, page: Path) -> None:
    light, dark = (show(browser, page, 800, dark=dark).run(MEASURE) for dark in (False, True))

    def brightness(color: str) -> float:
        return sum(map(int, re.findall(r"\d+", color)[:3])) / 765

    assert brightness(light["background"]) > 0.9
    assert brightness(light["ink"]) < 0.4
    assert brightness(dark["background"]) < 0.2
    assert brightness(dark["ink"]) > 0.7


def test_the_figures_are_to_be_seen(browser: chromium.Browser, page: Path) -> None:
    """In a picture of the screen, every figure has lines and letters where the browser says that it is."""
    shown = show(browser, page, 1200)
    found, pixels = shown.run(MEASURE), imread(BytesIO(shown.screenshot()))[..., :3]
    assert pixels.shape[:2] == (HEIGHT, 1200)
    for name, (left, top, width, height) in found["figures"].items():
        part = pixels[round(top) : round(top + height), round(left) : round(left + width)]
        differs = (np.abs(part - part[0, 0]).max(-1) > 0.15).mean()
        assert 0.005 < differs < 0.9, name
