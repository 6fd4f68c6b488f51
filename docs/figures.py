"""The demo's figures and the pictures of README and docs that a laptop can make, from the commit that is checked out.

    make figures            # about half an hour on two quiet cores; stopped, it goes on where it was
    python docs/figures.py --docs /tmp/docs --work /tmp/work steps=4    # the same in small, to try it

It trains the demo with three seeds and prints what README says about it, as ranges; draws `solve.svg` by the first of
them; runs the demo study; and, where there is a Chromium, photographs the study's report (`report.png`) and the page of
`tinypod view`: curves (`view.png`), and a board with the model that comes with tinypod (`view_board.png`).
"""

import argparse
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from tinypod.runs.folder import open_run
from tinypod.runs.load import load_weights
from tinypod.runs.release import open_release, shipped
from tinypod.solve import refine
from tinypod.solve.display import Refinement
from tinypod.solve.stops import count_stops, most_telling
from tinypod.view.server import open_server

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import chromium  # noqa: E402 (the tests' driver of a browser)

SEEDS = (0, 1, 2)
REPORT_SIZE = (1000, 1880)  # pixels: the short answers, the tables and the first curves
FIRST, SLOWER = "demo", "slower"  # runs that the page shows side by side
SOLVER, HALF_WAY = "sudoku", 8  # the release on the board, and the step that is shown
PUZZLE = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."


def tinypod(*arguments: object, work: Path) -> None:
    subprocess.run([sys.executable, "-m", "tinypod", *map(str, arguments)], cwd=work, check=True)


def train_demos(work: Path, overrides: Sequence[str]) -> list[Path]:
    runs = [Path("runs") / (FIRST if seed == 0 else f"{FIRST}_seed{seed}") for seed in SEEDS]
    for seed, run in zip(SEEDS, runs, strict=True):
        tinypod("demo", f"seed={seed}", *overrides, "--run", run, work=work)
    return [work / run for run in runs]


def read_refinements(run: Path) -> Sequence[Refinement]:
    loaded = load_weights(open_run(run), [], "best")
    return refine.refinements(loaded.experiment, loaded.params, limit=None)


def describe(refined: Sequence[Sequence[Refinement]]) -> str:
    def span(values: Sequence[float], unit: str = " %") -> str:
        low, high = (f"{value:.1f}" for value in (min(values, default=0.0), max(values, default=0.0)))
        return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"

    found = [count_stops(one) for one in refined]
    first = [100 * sum(bool(puzzle.solved_steps[0]) for puzzle in one) / len(one) for one in refined]
    return "\n".join(
        [
            f"The demo, seeds {', '.join(map(str, SEEDS))}:",
            f"  held-out puzzles solved: {span([100 * one.solved / one.puzzles for one in found])}",
            f"  right after the first step: {span(first)}",
            f"  stopped at by itself: {span([100 * one.stopped / one.puzzles for one in found])}",
            f"  after, on average: {span([one.mean_steps for one in found if one.stopped], ' steps')}",
            f"  of these stops, right: {span([100 * one.right / one.stopped for one in found if one.stopped])}",
        ]
    )


def photograph_report(browser: chromium.Browser, page: Path, target: Path) -> None:
    shown = browser.open(*REPORT_SIZE)
    shown.go(page.resolve().as_uri())
    target.write_bytes(shown.screenshot())


def photograph_view(browser: chromium.Browser, runs: Path, target: Path) -> None:
    """The curves of two runs."""
    with chdir(runs.parent), open_server([Path(runs.name)], 0) as server:  # the page says where the runs are
        threading.Thread(target=server.serve_forever, daemon=True).start()
        known = {run["name"]: run["id"] for run in server.runs.listing()}
        page = browser.open(1280, 900)
        page.go(f"{server.url}#runs={known[FIRST]},{known[SLOWER]}&run={known[FIRST]}&tab=curves")
        page.wait("document.querySelectorAll('.curve').length === 8")
        page.wait("!document.querySelector('#differences').hidden")
        page.hover("figure[data-metric='eval/exact_accuracy'] svg", 0.7)
        page.wait("!document.querySelector('figure[data-metric=\"eval/exact_accuracy\"] .readout').hidden")
        target.write_bytes(page.screenshot())
        server.shutdown()


def photograph_board(browser: chromium.Browser, target: Path) -> None:
    """The 9×9 model that comes with tinypod, half-way through README's puzzle."""
    with open_server([], 0, [open_release(shipped()[SOLVER])]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        known = {release["name"]: release["id"] for release in server.runs.listing()}
        page = browser.open(1280, 760, dark=True)
        page.go(f"{server.url}#run={known[SOLVER]}&tab=board")
        page.wait(f"document.querySelectorAll('#grid .cell').length === {len(PUZZLE)}")
        page.run(f"setGivens('{PUZZLE}')")
        page.click("#solve")
        page.wait("!document.querySelector('#refinement').hidden")
        page.run(f"goTo({HALF_WAY})")
        target.write_bytes(page.screenshot())
        server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the pictures go")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "figures", help="where puzzles and runs go")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="changes to the demo and to the demo study")
    options = parser.parse_args()
    docs, work = options.docs.absolute(), options.work.absolute()
    for folder in (docs, work):
        folder.mkdir(parents=True, exist_ok=True)
    runs = train_demos(work, options.overrides)
    refined = [read_refinements(run) for run in runs]
    print(describe(refined))
    number, _ = most_telling(refined[0])
    tinypod("solve", runs[0], "--number", number, "--svg", docs / "solve.svg", work=work)
    slower = ("optimizer.learning_rate=1.5e-3", *options.overrides)
    tinypod("train", FIRST, *slower, "--run", Path("runs") / SLOWER, work=work)
    tinypod("study", "run", "studies/demo", *options.overrides, work=work)
    if why := chromium.why_not():
        print(f"The pictures of pages are left as they are: {why}")
        return
    with chromium.Browser(work / "chromium") as browser:
        photograph_report(browser, work / "studies" / "demo" / "report" / "report.html", docs / "report.png")
        photograph_view(browser, work / "runs", docs / "view.png")
        photograph_board(browser, docs / "view_board.png")


if __name__ == "__main__":
    main()
