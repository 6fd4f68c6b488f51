"""Commands for hardware that is not here yet."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tinypod.cli.shared import Overrides, app, console, errors, load_config
from tinypod.errors import UserError

LOCAL = "local"


@app.command()
def plan(
    config: Annotated[str, typer.Argument(help="A YAML config, or a run folder.")],
    overrides: Overrides = None,
    slice_names: Annotated[
        list[str] | None,
        typer.Option("--slice", help="A TPU slice, like `v4-64`, or `local`: the device at hand. May be repeated."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Rank slices that end within this time: `24h`, `90m`, `3d`.")
    ] = None,
    max_dollars: Annotated[
        float | None, typer.Option("--dollars", min=0, help="Rank slices that cost at most this.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Rank by spot prices.")] = False,
    grant: Annotated[bool, typer.Option("--grant", help="Chips are free (TPU Research Cloud).")] = False,
    prices_file: Annotated[
        Path | None, typer.Option("--prices", help="Your own table of prices, in YAML; default: the package's.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="With --slice local: run ten steps and compare.")] = False,
    search: Annotated[bool, typer.Option(help="Where the step does not fit, look for what would.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compile again what is in the cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Will it fit, how fast will it be, what will it cost? Compiles the very step for slices that nobody holds.

    The TPU compiler needs no TPU (extra `plan`). Compiling takes a minute or so a slice; asking again is instant.

    Examples: `tinypod plan trm/sudoku_mlp --slice v4-64 --slice v5p-32 batch_size=6144`,
    `tinypod plan trm/sudoku_mlp --budget 24h`, `tinypod plan demo --slice local --measure`.
    """
    names = [name.strip().lower() for name in slice_names or []]
    ranked = budget is not None or max_dollars is not None
    if not names and not ranked:
        raise UserError("say for which hardware: --slice v4-64 (several may be given), --slice local, or --budget 24h")
    if LOCAL in names and (ranked or len(names) > 1):
        raise UserError("--slice local stands alone: without other slices, --budget or --dollars")
    if measure and names != [LOCAL]:
        raise UserError("--measure runs steps, so it needs --slice local")
    loaded = load_config(config, overrides)
    if names == [LOCAL]:
        _plan_local(loaded, measure=measure, search=search, as_json=as_json)
    elif ranked:
        hours = None if budget is None else parse_hours(budget)
        _rank(loaded, names, hours, max_dollars, spot=spot, grant=grant, prices=prices_file, fresh=fresh, json_=as_json)
    else:
        _plan_slices(loaded, names, grant=grant, prices=prices_file, search=search, fresh=fresh, json_=as_json)


def parse_hours(text: str) -> float:
    """`24h`, `90m`, `1.5d`, as hours."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhd])", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise UserError(f"--budget {text}: expected a time like 24h, 90m or 3d")
    return float(found[1]) * {"m": 1 / 60, "h": 1.0, "d": 24.0}[found[2]]


def _plan_slices(
    config: Any, names: list[str], *, grant: bool, prices: Path | None, search: bool, fresh: bool, json_: bool
) -> None:
    import json
    from functools import partial

    from tinypod.plan import slices as table
    from tinypod.plan import tables as plan_tables
    from tinypod.plan.planner import Planner
    from tinypod.plan.planner import check as check_mesh
    from tinypod.plan.prices import read_prices
    from tinypod.plan.search import find_fit

    targets = list(dict.fromkeys(table.find_slice(name) for name in names))
    for target in targets:  # before minutes are spent on the first
        check_mesh(config, target)
    price_table = read_prices(prices)
    planner = Planner(config, price_table, errors, grant=grant, fresh=fresh)
    shown, messages, answers = [], [], []
    for target in targets:
        made = planner.plan(target)
        shown.append(made)
        proposal = None
        if not made.fits:
            if search:
                proposal = find_fit(config, made, partial(planner.plan, target))
            shown += [proposal] if proposal else []
            messages.append(plan_tables.too_large(made, proposal))
        answers.append(plan_tables.as_json(made, proposal))
    if json_:
        print(json.dumps({"prices": price_table.model_dump(mode="json"), "plans": answers}))
        return
    _print(plan_tables.tables(shown, price_table, grant=grant))
    for message in messages:
        console.print(message, style="yellow", highlight=False, soft_wrap=True)


def _rank(
    config: Any,
    names: list[str],
    hours: float | None,
    max_dollars: float | None,
    *,
    spot: bool,
    grant: bool,
    prices: Path | None,
    fresh: bool,
    json_: bool,
) -> None:
    import json

    from tinypod.plan import slices as table
    from tinypod.plan import tables as plan_tables
    from tinypod.plan.planner import Planner
    from tinypod.plan.prices import read_prices
    from tinypod.plan.search import rank

    price_table = read_prices(prices)
    targets = list(dict.fromkeys(table.find_slice(name) for name in names)) or None
    planner = Planner(config, price_table, errors, grant=grant, fresh=fresh)
    ranked = rank(planner, targets, max_hours=hours, max_dollars=max_dollars, spot=spot)
    if json_:
        listed = [entry.as_json() for entry in ranked.entries]
        prices_used = price_table.model_dump(mode="json")
        print(json.dumps({"prices": prices_used, "slices": listed, "left_out": ranked.left_out}))
    else:
        _print(plan_tables.ranking(ranked, price_table, grant=grant))


def _print(tables: Any) -> None:
    from tinypod.plan.tables import WIDTH

    Console(width=max(console.width, WIDTH)).print(tables)


def _plan_local(config: Any, *, measure: bool, search: bool, as_json: bool) -> None:
    import json

    from tinypod.plan import local as local_device

    shown = [local_device.plan_here(config, errors, measure=measure)]
    if not shown[0].fits and search:
        found = local_device.find_fit_here(config, shown[0], errors, measure=measure)
        shown += [found] if found else []
    if as_json:
        print(json.dumps({"plans": [local_device.as_json(plan) for plan in shown]}))
        return
    for plan in shown:
        console.print(local_device.render(plan))
