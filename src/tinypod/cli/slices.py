"""`tinypod slices`."""

from typing import Annotated

import typer

from tinypod.cli.shared import app, console


@app.command()
def slices(
    name: Annotated[str | None, typer.Argument(help="One slice, like `v4-64`; default: all.")] = None,
    chips: Annotated[int | None, typer.Option(help="Check a belief: so many chips.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Check a belief: so many hosts (workers, JAX processes).")] = None,
    devices: Annotated[int | None, typer.Option(help="Check a belief: so many JAX devices.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """TPU slices: chips, hosts, what JAX sees, memory and speed.

    Example: `tinypod slices v4-32 --hosts 8` is an error that says what a v4-32 has.
    """
    import json

    from tinypod.planning import slices as table
    from tinypod.planning import slices_view

    shown = table.all_slices() if name is None else [table.find_slice(name)]
    if name is not None:
        shown[0].check_claims(chips=chips, hosts=hosts, devices=devices)
    if as_json:
        print(json.dumps([slices_view.as_json(one) for one in shown]))
    else:
        console.print(slices_view.render(shown))
