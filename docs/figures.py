"""The figures and pictures of README and docs that a laptop can make, from the commit that is checked out.

    make figures            # about twenty minutes on two quiet cores; stopped, it goes on where it was
    python docs/figures.py --docs /tmp/docs --work /tmp/work steps=4    # the same in small, to try it

It trains the demo with three seeds and prints what README says about it, as ranges; draws `solve.svg` by the first of
them; runs the demo study and photographs its report (`report.png`, where there is a Chromium).
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tinypod.runs.folder import open_run
from tinypod.runs.load import load_weights
from tinypod.solve import refine
from tinypod.solve.stops import Stops, count_stops

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
REPORT_SIZE = (1000, 1880)  # pixels: the short answers, the tables and the first curves
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-sync")


def tinypod(*arguments: object, work: Path) -> None:
    subprocess.run([sys.executable, "-m", "tinypod", *map(str, arguments)], cwd=work, check=True)


def train_demos(work: Path, overrides: Sequence[str]) -> list[Path]:
    runs = [Path("runs") / f"demo_seed{seed}" for seed in SEEDS]
    for seed, run in zip(SEEDS, runs, strict=True):
        tinypod("demo", f"seed={seed}", *overrides, "--run", run, work=work)
    return [work / run for run in runs]


def read_stops(run: Path) -> Stops:
    loaded = load_weights(open_run(run), [], "best")
    return count_stops(refine.refinements(loaded.experiment, loaded.params, limit=None))


def describe(found: Sequence[Stops]) -> str:
    def span(values: Sequence[float]) -> str:
        low, high = (f"{100 * value:.1f}" for value in (min(values), max(values)))
        return f"{low} %" if low == high else f"{low} to {high} %"

    stops = [one.right / one.stopped for one in found if one.stopped]
    return "\n".join(
        [
            f"The demo, seeds {', '.join(map(str, SEEDS))}:",
            f"  held-out puzzles solved: {span([one.solved / one.puzzles for one in found])}",
            f"  stopped at by itself: {span([one.stopped / one.puzzles for one in found])}",
            f"  of these stops, right: {span(stops) if stops else 'none'}",
        ]
    )


def photograph(page: Path, target: Path, work: Path) -> None:
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        print(f"{target} is left as it is: no Chromium here to photograph {page} with")
        return
    size = "--window-size={},{}".format(*REPORT_SIZE)
    flags = [*QUIET, f"--user-data-dir={work / 'chromium'}", size, f"--screenshot={target}"]
    subprocess.run([browser, *flags, page.resolve().as_uri()], check=True, capture_output=True)


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
    tinypod("solve", runs[0], "--svg", docs / "solve.svg", work=work)
    tinypod("study", "run", "studies/demo", *options.overrides, work=work)
    photograph(work / "studies" / "demo" / "report" / "report.html", docs / "report.png", work)
    print(describe([read_stops(run) for run in runs]))


if __name__ == "__main__":
    main()
