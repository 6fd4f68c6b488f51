"""The page in a real browser: headless Chromium, where there is one."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from synthetic_study import grid, rising, write_study
from tinypod.study.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
FLAGS += ("--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000")
DARK = ("--blink-settings=preferredColorScheme=0",)
LIMIT_S = 300

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def chromium() -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: install it (Debian: apt-get install chromium)")
    # Some systems have a stand-in of that name that only says where to get the browser.
    asked = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if asked.returncode != 0:
        pytest.skip(f"{CHROMIUM} does not start: {asked.stderr.strip()[-200:]}")


# Sent from inside the page, because a page of file:// may not look into another.
MEASURE = """<script>addEventListener("load", () => {
  const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.width, r.height] }
  const figures = [...document.querySelectorAll("figure")]
  const texts = figures.flatMap(figure => [...figure.querySelectorAll("svg text")].map(text => ({
    name: figure.id, text: text.textContent, box: box(text), svg: box(figure.querySelector("svg")),
    size: parseFloat(getComputedStyle(text).fontSize) * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)})))
  parent.postMessage({
    width: innerWidth, content: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.querySelector("figure svg text")).fill,
    figures: Object.fromEntries(figures.map(figure => [figure.id, box(figure.querySelector("svg"))])),
    tables: [...document.querySelectorAll(".scroll")].map(box), texts}, "*")
})</script>"""
FRAME = """<!doctype html><body style="margin:0"><pre id="measured"></pre>
<script>addEventListener("message", event => {
  document.getElementById("measured").textContent = JSON.stringify(event.data) })</script>
<iframe src="%s" style="width:%dpx;height:6000px;border:0"></iframe></body>"""


def browse(tmp_path: Path, url: Path, *flags: str) -> str:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, url.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def measure(tmp_path: Path, page: Path, width: int, *flags: str) -> dict[str, Any]:
    """What the browser made of the page, in a frame of some width: its own window is never narrower than 500."""
    probe, frame = page.with_name("probe.html"), page.with_name("frame.html")
    probe.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    frame.write_text(FRAME % (probe.name, width))
    dom = browse(tmp_path, frame, "--window-size=1400,6200", "--dump-dom", *flags)
    found = re.search(r'<pre id="measured">(.+?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    measured: dict[str, Any] = json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    return measured


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
def test_the_page_fits_a_phone_and_a_desk(tmp_path: Path, page: Path, width: int) -> None:
    found = measure(tmp_path, page, width)
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


def test_the_page_is_dark_where_the_reader_is(tmp_path: Path, page: Path) -> None:
    light, dark = measure(tmp_path, page, 800), measure(tmp_path, page, 800, *DARK)

    def brightness(color: str) -> float:
        return sum(map(int, re.findall(r"\d+", color)[:3])) / 765

    assert brightness(light["background"]) > 0.9
    assert brightness(light["ink"]) < 0.4
    assert brightness(dark["background"]) < 0.2
    assert brightness(dark["ink"]) > 0.7


def test_the_figures_are_to_be_seen(tmp_path: Path, page: Path) -> None:
    """In a picture of the screen, every figure has lines and letters where the browser says that it is."""
    found = measure(tmp_path, page, 1200)
    shot = tmp_path / "shot.png"
    browse(tmp_path, page, "--window-size=1200,6000", f"--screenshot={shot}")
    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (6000, 1200)
    for name, (left, top, width, height) in found["figures"].items():
        part = pixels[round(top) : round(top + height), round(left) : round(left + width)]
        differs = (np.abs(part - part[0, 0]).max(-1) > 0.15).mean()
        assert 0.005 < differs < 0.9, name
