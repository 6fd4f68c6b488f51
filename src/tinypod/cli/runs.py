"""`tinypod runs`."""

import os
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


@runs_app.command("pack")
def runs_pack(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the pieces go: a new or empty folder.")],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Which one goes with it: `latest`, `best` or a step.")
    ] = "latest",
    piece: Annotated[str, typer.Option(help="No file is larger than this.")] = "16MiB",
    without_carry: Annotated[
        bool,
        typer.Option(
            "--without-carry",
            help="Leave out what the rows of the batch were thinking, often most of it: when the run resumes they "
            "begin new examples, so that it is not the same run to the bit.",
        ),
    ] = False,
) -> None:
    """Write a run as small files, to take it to another machine: its config, its metrics and one checkpoint, cut into
    pieces with checksums. `tinypod runs unpack` puts them together there, and `tinypod train` resumes the run.

    Example: `tinypod runs pack runs/sudoku pieces --piece 16MiB`
    """
    from tinypod.runs import pieces
    from tinypod.runs.folder import open_run
    from tinypod.runs.terminal import say

    if without_carry and "JAX_PLATFORMS" not in os.environ:  # the run itself may have the devices
        import jax

        jax.config.update("jax_platforms", "cpu")
    packed = pieces.pack(open_run(run), out, console, checkpoint=checkpoint, piece=piece, without_carry=without_carry)
    say(
        console,
        f"wrote {len(packed.pieces):,} pieces and {pieces.MANIFEST}. Copy all of {out}, in any order, and put it "
        f"together with `tinypod runs unpack FOLDER {packed.run}`",
    )


@runs_app.command("unpack")
def runs_unpack(
    pieces_folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With the pieces and manifest.json.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder to make.")],
) -> None:
    """Put a packed run together again. Pieces that are missing or damaged are named, and nothing is written until all
    are there: copy these again, and run the same command.

    Example: `tinypod runs unpack pieces runs/sudoku`
    """
    from tinypod.runs import pieces
    from tinypod.runs.terminal import say

    packed = pieces.unpack(pieces_folder, run, console)
    say(
        console,
        f"{run}: the run {packed.run} as of step {packed.step:,}. Resume it with `tinypod train {run}`, and with "
        "data.path=FOLDER if its data lies elsewhere on this machine",
    )
