"""`tinypod runs`."""

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
