"""`tinypod slices`."""

from typing import Annotated

import typer

from tinypod.cli.shared import app, console
from tinypod.errors import UserError


@app.command()
def slices(
    name: Annotated[
        str | None,
        typer.Argument(help="A slice or GPUs, like `v4-64` or `h100-8`, or a kind, like `v4` or `h100`; default: all."),
    ] = None,
    chips: Annotated[int | None, typer.Option(help="Fail unless it has this many chips.")] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Fail unless it has this many hosts (workers, JAX processes).")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Fail unless it has this many JAX devices.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """TPU slices and GPUs: chips, hosts, what JAX sees, memory and speed.

    Example: `tinypod slices v4-32 --hosts 8` is an error that says what a v4-32 has.
    """
    import json

    from tinypod.planning import slices_view
    from tinypod.planning.hardware import check_claims, find_all

    shown = find_all(name)
    claims = {"chips": chips, "hosts": hosts, "devices": devices}
    if len(shown) == 1:
        check_claims(shown[0], **claims)
    elif given := [f"--{claim}" for claim, value in claims.items() if value is not None]:
        of_which = f"{shown[-1].name} --hosts {shown[-1].hosts}" if name else "v4-32 --hosts 4"
        raise UserError(f"{' and '.join(given)}: say of which slice, like `tinypod slices {of_which}`")
    if as_json:
        print(json.dumps([slices_view.as_json(one) for one in shown]))
    else:
        console.print(slices_view.render(shown))
