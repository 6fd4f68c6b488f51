"""`tinypod plan`."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from tinypod.cli.shared import Overrides, TakesOverrides, app, complete_config, console, errors, load_config
from tinypod.errors import DeviceMemoryError, UserError
from tinypod.runs.terminal import say

LOCAL = "local"


@app.command(cls=TakesOverrides)
def plan(
    config: Annotated[str, typer.Argument(help="A YAML config, or a run folder.", autocompletion=complete_config)],
    overrides: Overrides = None,
    slice_names: Annotated[
        list[str] | None,
        typer.Option(
            "--slice", help="A TPU slice, like `v4-64`, GPUs, like `h100-8`, or `local`: this machine. May be repeated."
        ),
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
    """Will it fit, how fast will it be, what will it cost? Compiles the very step for slices you don't have.

    The TPU compiler needs no TPU (extra `plan`), nor does XLA's GPU compiler need a GPU (extra `cuda`; without it,
    plans for GPUs are guesses from the program for CPUs). Compiling takes about a minute per slice; asking again is
    instant.
    It ends with exit code 80 where the step does not fit, also where a variant of it does.

    Examples: `tinypod plan trm/sudoku_mlp --slice v4-64 --slice v5p-32 batch_size=6144`,
    `tinypod plan trm/sudoku_mlp --slice v5e-16 mesh.slices=2` (two of them, joined by the data centre's network),
    `tinypod plan trm/sudoku_mlp --slice h100-8`, `tinypod plan trm/sudoku_mlp --budget 24h`,
    `tinypod plan demo --slice local --measure`.
    """
    names = [name.strip().lower() for name in slice_names or []]
    ranked = budget is not None or max_dollars is not None
    if not names and not ranked:
        raise UserError(
            "name the hardware: --slice v4-64 or --slice h100-8 (may be repeated), --slice local, or --budget 24h"
        )
    if LOCAL in names and (ranked or len(names) > 1):
        raise UserError("--slice local cannot be combined with other slices, --budget or --dollars")
    if measure and names != [LOCAL]:
        raise UserError("--measure runs steps, so it needs --slice local")
    hours = None if budget is None else parse_hours(budget)
    loaded = load_config(config, overrides)
    if names == [LOCAL]:
        from tinypod.planning.local import plan_local

        return _show([plan_local(loaded, errors, measure=measure, search=search)], None, as_json, search)

    from tinypod.planning.hardware import find_hardware
    from tinypod.planning.planner import Planner, check
    from tinypod.planning.prices import read_prices
    from tinypod.planning.search import Budget, plan_slice, rank

    targets = list(dict.fromkeys(find_hardware(name).times(loaded.mesh.slices) for name in names))
    prices = read_prices(prices_file, grant=grant)
    for target in targets:  # before minutes are spent on the first
        check(loaded, target)
    planner = Planner(loaded, prices, errors, fresh=fresh)
    if ranked:
        return _show_ranking(rank(planner, targets or None, Budget(hours, max_dollars, spot)), prices, as_json)
    _show([plan_slice(planner, target, search=search) for target in targets], prices, as_json, search)


def parse_hours(text: str) -> float:
    """`24h`, `90m`, `1.5d`, as hours."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhd])", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise UserError(f"--budget {text}: expected a time like 24h, 90m or 3d")
    return float(found[1]) * {"m": 1 / 60, "h": 1.0, "d": 24.0}[found[2]]


def _show(plans: Any, prices: Any, as_json: bool, searched: bool) -> None:
    from tinypod.planning import tables

    if as_json:
        _print_json(prices, plans=[tables.as_json(plan) for plan in plans])
        return _end(plans)
    console.print(tables.tables(plans, prices))
    for plan in plans:
        if not plan.fits:
            say(console, tables.too_large(plan, searched=searched), "yellow")
    _end(plans)


def _end(plans: Any) -> None:
    if not all(plan.fits for plan in plans):
        raise typer.Exit(DeviceMemoryError.exit_code)


def _show_ranking(ranking: Any, prices: Any, as_json: bool) -> None:
    from tinypod.planning import tables

    if as_json:
        entries = [entry.model_dump(mode="json") for entry in ranking.entries]
        _print_json(prices, slices=entries, left_out=ranking.left_out, stopped=ranking.stopped)
    else:
        console.print(tables.ranking(ranking, prices))
    if ranking.stopped:
        raise typer.Exit(130)


def _print_json(prices: Any, **answer: Any) -> None:
    import json

    print(json.dumps(({} if prices is None else {"prices": prices.model_dump(mode="json")}) | answer))
