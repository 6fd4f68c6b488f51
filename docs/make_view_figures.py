"""Makes docs/view.png and docs/view_board.png: the page of `tinypod view` in a headless Chromium.

    python docs/make_view_figures.py RUNS

RUNS is a folder with the runs `demo` and `slower`, made by

    tinypod data sudoku data/demo --generate --box 2x3 --clues 20 --train-size 1000 --test-size 500
    tinypod train demo --run RUNS/demo
    tinypod train demo optimizer.learning_rate=2e-3 steps=200 --run RUNS/slower
"""

import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chromium import Browser  # noqa: E402 (the tests' driver)
from tinypod.view.server import open_server  # noqa: E402

EXAMPLE = 8  # a held-out puzzle that takes the model more than a step


def main(runs: Path) -> None:
    with open_server([runs], 0) as server, tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        known = {run["name"]: run["id"] for run in server.runs.listing()}
        chosen = f"{server.url}#runs={known['demo']},{known['slower']}&run={known['demo']}"
        with Browser(Path(folder) / "profile") as browser:
            page = browser.open(1280, 900)
            page.go(f"{chosen}&tab=curves")
            page.wait("document.querySelectorAll('.curve').length === 8")
            page.wait("!document.querySelector('#differences').hidden")
            page.hover("figure[data-metric='eval/exact_accuracy'] svg", 0.7)
            page.wait("!document.querySelector('figure[data-metric=\"eval/exact_accuracy\"] .readout').hidden")
            (ROOT / "docs" / "view.png").write_bytes(page.screenshot())
            page = browser.open(1280, 760, dark=True)
            page.go(f"{chosen}&tab=board")
            page.wait("document.querySelectorAll('#grid .cell').length === 36")
            page.run(f"state.board.example = {EXAMPLE - 1}")
            page.click("#example")
            page.wait("document.querySelectorAll('#grid .given').length > 0")
            page.click("#solve")
            page.wait("!document.querySelector('#refinement').hidden")
            page.run("goTo(2)")
            (ROOT / "docs" / "view_board.png").write_bytes(page.screenshot())
        server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
