"""`tinypod configs`."""

import itertools
import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinypod.cli import shared
from tinypod.cli.shared import app, console

if TYPE_CHECKING:
    from rich.table import Table

    from tinypod.config import Origin


@app.command(cls=shared.TakesOverrides)
def configs(
    name: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="A recipe, a config file or a study; default: list them.")
    ] = None,
    overrides: shared.Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: [value, source] by key.")] = False,
) -> None:
    """List the recipes and studies that are shipped, or print one, resolved, with the source of each key.

    What is printed is YAML that `tinypod train FILE` takes, to start a config of your own from.

    Examples: `tinypod configs`, `tinypod configs trm/sudoku_mlp`, `tinypod configs demo steps=500 > mine.yaml`
    """
    from tinypod import config as reader
    from tinypod.errors import UserError
    from tinypod.experiment import ExperimentConfig
    from tinypod.study.file import is_study, load_study

    if name is None:
        if as_json:
            raise UserError("--json prints one config: name it, like `tinypod configs demo --json`")
        for table in _tables():
            console.print(table)
        console.print(
            "`tinypod configs NAME` prints one, `tinypod train NAME` trains it, `tinypod study run NAME` a study.",
            highlight=False,
        )
    elif is_study(name):
        study = load_study(name, overrides or [])
        print(reader.locate(name).read_text(), end="")
        print(f"# {len(study.runs)} runs; `tinypod configs {study.file.base}` prints what they start from")
    else:
        found = reader.origins(name, overrides or [], ExperimentConfig)
        if as_json:
            print(json.dumps({origin.key: [origin.value, origin.source] for origin in found}))
            return
        print("\n".join(_as_yaml(found)))


def _tables() -> "list[Table]":
    from rich import box
    from rich.table import Table

    from tinypod import config as reader
    from tinypod.study.file import is_study, load_study

    tables = []
    studies = {name: is_study(name) for name in reader.recipes()}
    for title, wanted, counted in (("recipe", False, "steps"), ("study", True, "runs")):
        table = Table(title, counted, "what it is", box=box.SIMPLE_HEAD, pad_edge=False)
        table.columns[1].justify, table.columns[0].no_wrap = "right", True
        for name in (name for name, study in studies.items() if study == wanted):
            path = reader.locate(name)
            count = len(load_study(name).runs) if wanted else reader.read_tree(path)["steps"]
            table.add_row(name, f"{count:,}", _first_sentence(path.read_text()))
        tables.append(table)
    return tables


def _first_sentence(text: str) -> str:
    """Of the comment at the top; commands in it are indented."""
    comment = itertools.takewhile(lambda line: re.match(r"# \S", line), text.splitlines())
    return " ".join(line.removeprefix("# ") for line in comment).partition(". ")[0].removesuffix(".")


def _as_yaml(found: "list[Origin]") -> list[str]:
    """One line a key, its source as a comment; they stand below each other as far as values are short."""
    lines: list[str] = []
    above: list[str] = []  # the sections that the line before stands in
    for origin in found:
        *sections, key = origin.key.split(".")
        common = next((i for i, pair in enumerate(zip(above, sections, strict=False)) if len(set(pair)) > 1), None)
        start = min(len(above), len(sections)) if common is None else common
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(start, len(sections))]
        above = sections
        lines.append(f"{'  ' * len(sections) + key + ': ' + _inline(origin.value):<46}  # {origin.source}")
    return lines


def _inline(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")
