"""`tinypod demo`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tinypod.cli import shared
from tinypod.cli.shared import app, console, load_config

RECIPE = "demo"


@app.command(cls=shared.TakesOverrides)
def demo(
    overrides: shared.Overrides = None,
    run: Annotated[str, typer.Option("--run", help="The run folder.")] = "runs/demo",
) -> None:
    """Make small Sudokus, train a model on them, and watch it solve one: about two minutes on two cores.

    Puzzles go to data/demo, the run to runs/demo, both in the folder that this is started in. What is there already
    is not made again; Ctrl-C saves, and the same command resumes.

    Examples: `tinypod demo`, `tinypod demo seed=1 --run runs/demo1`
    """
    from tinypod.cli.train import train
    from tinypod.runs.terminal import say

    make_puzzles(load_config(RECIPE, overrides).data.path)
    train(RECIPE, overrides, run)
    say(console, "")
    _show_refinement(run)
    say(console, "\nWhat to try next:")
    for command, what in _next_commands(run):
        say(console, f"  {command}\n      {what}")


def make_puzzles(path: str) -> None:
    """Those that the recipe's comment describes."""
    from tinypod import api
    from tinypod.runs import storage

    if not storage.is_remote(path) and not (Path(path) / "dataset.json").is_file():
        api.make_sudoku(path, box=(2, 3), clues=12, train_size=1000, test_size=500)


def _show_refinement(run: str) -> None:
    """One puzzle being solved, and over all held-out ones: how many are solved, how often its own stop was right."""
    from tinypod import api
    from tinypod.runs.terminal import say
    from tinypod.solve import display, stops

    refined = api.load(run).solve_held_out(limit=None)
    number, why = stops.most_telling(refined)
    say(console, f"Held-out puzzle {number}: {why}.")
    console.print(display.render_refinement(refined[number]))
    console.print()
    for sentence in stops.count_stops(refined).sentences():
        say(console, sentence)


def _next_commands(run: str) -> list[tuple[str, str]]:
    at = shlex.quote(run)
    return [
        (f"tinypod solve {at} --number 7", "watch another puzzle; or give one in characters, `.` for a blank"),
        (f"tinypod eval {at} --halt-steps 32", "let it think longer than it was trained to"),
        ("tinypod train demo model.mixing.kind=attention --run runs/attention", "change one thing, and compare"),
        ("tinypod train demo seed=0,1,2 --run studies/seeds", "three seeds in one program, and a report of them"),
        ("tinypod configs", "every recipe that is shipped, the paper's among them"),
    ]
