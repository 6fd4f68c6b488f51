"""`tinypod runs`."""

from pathlib import Path
from typing import Annotated

import typer

from tinypod.cli.shared import RunFolder, console, runs_app


@runs_app.command("status")
def runs_status(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Who is doing what in a run: processes, lag, stragglers, and where the time went."""
    import json
    import time

    from tinypod.runs import status
    from tinypod.runs.folder import open_run

    looked_at = open_run(run)
    looked_at.pull()
    looked_at.pull_heartbeats()
    found = status.read_status(looked_at.folder, time.time(), looked_at.checkpoints)
    if as_json:
        print(json.dumps(status.as_json(found)))
    else:
        console.print(status.render_status(found))


@runs_app.command("list")
def runs_list(
    folder: Annotated[
        str | None,
        typer.Argument(help="Where to look, local or gs://; default: `runs` and `studies` here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """The runs below a folder, newest first: state, step, the last and the best held-out score, time since it last did
    something.

    States: `running`; `done`; `early` (ended by a study's rule); `stopped` (resume it with `tinypod train RUN`);
    `waiting`, `new` and `imported` (not begun); `crashed` (its process is gone), `silent` (on another machine, and no
    heartbeat), `diverged`, `failed`, `damaged`.
    """
    import json
    import time

    from tinypod.runs import listing
    from tinypod.runs.terminal import say

    now = time.time()
    entries = listing.list_runs(folder, now)
    if as_json:
        print(json.dumps(listing.as_json(entries, now)))
    elif entries:
        console.print(listing.render(entries, now, console.width))
    else:
        say(console, f"no runs in {folder or 'runs or studies'}; train one with `tinypod train demo`, or name a folder")


@runs_app.command("compare")
def runs_compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders, or their gs:// URLs.")],
    png: Annotated[Path, typer.Option(help="Where to draw the curves of all of them.")] = Path("compare.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Runs side by side: the config keys in which they differ, what they reached, and their curves in one picture.

    Example: `tinypod runs compare runs/a runs/b --png a_and_b.png`
    """
    import json
    import time

    from tinypod.errors import UserError
    from tinypod.runs import compare
    from tinypod.runs.terminal import say

    if png.suffix.lower() != ".png":
        raise UserError(f"--png {png}: expected the name of a .png file")
    if not png.parent.is_dir():
        raise UserError(f"--png {png}: there is no folder {png.parent}; make it first")
    found = compare.compare(runs, time.time())
    drawn = found.draw(png)
    if as_json:
        print(json.dumps(compare.as_json(found) | {"png": None if drawn is None else str(drawn)}))
        return
    console.print(compare.render(found, console.width))
    say(console, f"\ncurves: {drawn}" if drawn else "\nno curves: nothing was logged yet")
