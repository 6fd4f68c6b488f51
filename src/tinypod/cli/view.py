"""`tinypod view`."""

from typing import Annotated

import typer

from tinypod.cli.shared import app, console


@app.command()
def view(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUNS", help="Folders with runs, runs, or release files; default: `runs` and `studies`."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where; if taken, the next one that is free.")] = 8787,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Look at runs in the browser: live curves, health, comparisons, and a board to try a puzzle on.

    Releases have the board alone: those that come with tinypod are always there, others by their file.
    """
    import os
    import webbrowser

    from tinypod.view.runs import open_places
    from tinypod.view.server import open_server

    folders, releases = open_places(runs or [])
    with open_server(folders, port, releases) as server:
        line = f"{server.url} shows {', '.join(map(str, [*folders, *releases]))}; Ctrl-C ends it"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        if open_page:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("ended")
            os._exit(0)  # a puzzle may be on its way through the compiler, which would not end with us
