"""The page in a real browser: headless Chromium, where there is one, against `tinypod view` as a process."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import chromium
from chromium import Browser, Page
from releases import EXAMPLES, export
from tinypod.runs.metrics import MetricsLog, make_record
from viewed_runs import ESCAPES, MARKUP, make_runs

pytestmark = pytest.mark.slow
LIMIT_S = 300
RELEASE = "small.safetensors"  # beside the folder of runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := chromium.why_not():
        pytest.skip(why)
    made = make_runs(tmp_path_factory.mktemp("view"))
    (made.parent / "examples.txt").write_text(EXAMPLES[0])
    export(made / "first", made.parent / RELEASE, "--examples", str(made.parent / "examples.txt"))
    return made


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    """Of the command, started as a user does and ended with Ctrl-C."""
    command = [sys.executable, "-m", "tinypod", "view", str(runs), str(runs.parent / RELEASE), "--port", "0"]
    # Tests started in the background of a shell script ignore Ctrl-C, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        signal.signal(signal.SIGINT, before)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"(http://127\.0\.0\.1:\d+/) shows .*; Ctrl-C ends it\n", line)
            assert found, line
            yield found[1]
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=LIMIT_S)
            assert (process.returncode, rest.splitlines()[-1]) == (0, "ended")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def browser(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """Whatever a test does: nothing is asked of another host, and nothing goes wrong unseen."""
    page = browser.open()
    page.go(url)
    page.wait("document.querySelectorAll('#runs li').length >= 4")
    yield page
    assert {urlsplit(request).netloc for request in page.requests} == {urlsplit(url).netloc}
    assert page.dialogs == []
    assert page.errors == []


def box_of(name: str) -> str:
    return f'#runs input[aria-label="Curves of {name}"]'


def focus(page: Page, name: str) -> None:
    page.run(f"[...document.querySelectorAll('#runs .name')].find(n => n.textContent === {name!r}).click()")


def open_board(page: Page, name: str) -> None:
    focus(page, name)
    page.click("#tab-board")
    page.wait("document.querySelectorAll('#grid .cell').length === 16")


def test_two_runs_are_compared_and_follow_their_logs(page: Page, runs: Path) -> None:
    page.click(box_of("first"))
    page.wait("document.querySelectorAll('figure[data-metric=\"train/loss\"] .curve').length === 1")
    page.click(box_of("second"))
    page.wait("document.querySelectorAll('figure[data-metric=\"train/loss\"] .curve').length === 2")
    metrics = page.run("[...document.querySelectorAll('figure')].map(f => f.dataset.metric)")
    assert metrics == ["train/loss", "eval/exact_accuracy", "train/learning_rate", "perf/examples_per_s"]
    assert (
        page.run(
            "new Set([...document.querySelectorAll('#charts figure .curve')].map(c => getComputedStyle(c).stroke)).size"
        )
        == 2
    )
    page.wait("!document.querySelector('#differences').hidden")
    rows = page.run(
        "[...document.querySelectorAll('#differences tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    assert rows == [["key", "first", "second"], ["optimizer.learning_rate", "0.001", "0.002"]]

    second = page.run(f"document.querySelector('{box_of('second')}').closest('li').dataset.run")
    curve = f'document.querySelector(\'figure[data-metric="train/loss"] .curve[data-run="{second}"]\')'
    points, path = page.run(f"[Number({curve}.dataset.points), {curve}.getAttribute('d')]")
    MetricsLog(runs / "second").append(make_record(20, {"train/loss": 0.123}))
    page.wait(f"Number({curve}.dataset.points) === {points + 1}")
    assert page.run(f"{curve}.getAttribute('d')") != path

    page.hover("figure svg", 0.95)
    page.wait("!document.querySelector('figure .readout').hidden")
    readout = page.run("document.querySelector('figure .readout').textContent")
    assert "step 20" in readout
    assert "0.123 second" in readout.replace("  ", " ")


def test_health_says_where_the_time_went(page: Page) -> None:
    page.click(box_of("first"))
    page.click("#tab-health")
    page.wait("document.querySelector('#health .big')")
    text = page.run("document.querySelector('#health').innerText")
    assert "% goodput" in text
    assert "ended: done" in text
    assert "done: step 10 of 10" in text


def test_a_puzzle_is_typed_and_its_answer_watched(page: Page) -> None:
    open_board(page, "first")
    page.click("#grid .cell:nth-child(1)")
    page.type("1")
    page.type("2")  # the focus moves on by itself
    page.wait("document.querySelector('#grid .cell:nth-child(2)').value === '2'")
    assert page.run("[...document.querySelectorAll('#grid .given')].map(c => c.value).join('')") == "12"
    page.type("9")
    page.wait("!document.querySelector('#board-error').hidden")
    assert "cannot stand here" in page.run("document.querySelector('#board-error').textContent")
    page.click("#solve")
    page.wait("!document.querySelector('#refinement').hidden")
    assert page.run("document.querySelectorAll('#confidence button').length") == 3
    page.wait("document.querySelector('#where').textContent === 'Step 3 of 3'")  # it plays by itself
    page.click("#previous")
    page.wait("document.querySelector('#where').textContent === 'Step 2 of 3'")
    assert re.fullmatch(
        r"The model is \d+ % sure that this is right\.", page.run("document.querySelector('#sure').textContent")
    )
    marked = page.run("[...document.querySelectorAll('#grid .changed')].length")
    said = page.run("document.querySelector('#state').textContent")
    assert (f"{marked} cell" if marked else "No cell changed") in said
    page.click("#confidence button:nth-child(1)")
    page.wait("document.querySelector('#slider').value === '1'")
    assert page.run("document.querySelector('#grid .cell').className").split()[:2] == ["cell", "given"]
    page.click("#clear")
    page.wait("document.querySelector('#refinement').hidden")


def test_a_puzzle_is_pasted_and_an_example_shown(page: Page) -> None:
    open_board(page, "first")
    page.click("#paste")
    page.insert("1.3.\n.4.2\n2...\n...1".replace("\n", ""))
    page.wait("document.querySelectorAll('#grid .given').length === 6")
    assert (
        page.run("[...document.querySelectorAll('#grid .cell')].map(c => c.value || '.').join('')")
        == "1.3..4.22......1"
    )
    page.click("#example")
    page.wait("[...document.querySelectorAll('#grid .cell')].map(c => c.value || '.').join('') !== '1.3..4.22......1'")
    page.run("setGivens('1.3..4.22.....11')")
    page.click("#solve")
    page.wait("!document.querySelector('#board-error').hidden")
    assert "again in the same row, column or box" in page.run("document.querySelector('#board-error').textContent")
    page.errors.clear()  # the browser notes the answer 422, which the page has shown


def test_a_release_opens_its_board(page: Page, runs: Path) -> None:
    focus(page, str(runs.parent / RELEASE))
    page.wait("document.querySelectorAll('#grid .cell').length === 16 && !document.querySelector('#board').hidden")
    assert page.run("document.querySelector('#tab-health').hidden")
    assert page.run("document.querySelector('#legend').children.length") == 0
    assert page.run("[...document.querySelectorAll('#runs input')].at(-1).disabled")
    assert "release · step" in page.run("[...document.querySelectorAll('#runs .words')].at(-1).textContent")
    page.click("#example")
    page.wait(
        "[...document.querySelectorAll('#grid .cell')].map(c => c.value || '.').join('') === " + repr(EXAMPLES[0])
    )
    page.click("#solve")
    page.wait("document.querySelector('#where').textContent === 'Step 3 of 3'")
    assert "Checkpoint of step 10." in page.run("document.querySelector('#verdict').textContent")
    page.wait("document.querySelector('#live').textContent.startsWith('4 runs')")


def test_names_stay_text(page: Page, url: str) -> None:
    names = page.run("[...document.querySelectorAll('#runs .name')].map(n => n.textContent)")
    assert {MARKUP, ESCAPES} <= set(names)
    page.run("[...document.querySelectorAll('#runs input')].forEach(box => box.click())")
    page.wait("document.querySelectorAll('#legend li').length === 4")
    page.wait("!document.querySelector('#differences').hidden")
    for tab in ("health", "board", "curves"):
        focus(page, MARKUP)
        page.click(f"#tab-{tab}")
    page.hover("figure svg")
    page.wait(f"document.querySelector('figure .readout').textContent.includes({MARKUP!r})")
    assert page.run("[...document.images].map(image => image.getAttribute('src'))") == ["/icon.svg"]
    assert not page.run("'x' in window")


def test_a_run_that_appears_and_goes_is_followed(page: Page, runs: Path) -> None:
    shutil.copytree(runs / "first", runs / "third")
    page.wait("[...document.querySelectorAll('#runs .name')].some(n => n.textContent === 'third')")
    shutil.rmtree(runs / "third")
    page.wait("![...document.querySelectorAll('#runs .name')].some(n => n.textContent === 'third')")


@pytest.mark.parametrize("tab", ["curves", "health", "board"])
def test_the_page_fits_a_phone(page: Page, tab: str) -> None:
    page.resize(360, 800)
    open_board(page, "first")
    page.click("#example")
    page.wait("document.querySelectorAll('#grid .given').length")
    page.click("#solve")
    page.wait("!document.querySelector('#refinement').hidden")
    page.click(f"#tab-{tab}")
    page.wait(f"!document.querySelector('#{tab}').hidden && document.querySelector('#{tab}').offsetHeight > 300")
    assert page.run("document.documentElement.scrollWidth") == 360


def test_the_page_is_dark_where_the_reader_is(browser: Browser, url: str) -> None:
    brightness = []
    for dark in (False, True):
        page = browser.open(dark=dark)
        page.go(url)
        color = page.run("getComputedStyle(document.body).backgroundColor")
        brightness.append(sum(map(int, re.findall(r"\d+", color)[:3])) / 765)
    assert brightness[0] > 0.9
    assert brightness[1] < 0.2
