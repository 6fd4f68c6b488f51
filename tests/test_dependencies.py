"""Whatever the package imports is declared: not left to come along with something else."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
NAMES = {"orbax": "orbax-checkpoint", "yaml": "pyyaml"}  # imported as -> installed as
IN_ONE_PLACE = {
    "aiohttp": "gcs",
    "fsspec": "gcs",
    "gcsfs": "gcs",
    "numba": "sudoku",
    "qwix": "baselines",
    "torch": "torch",
    "wandb": "wandb",
}


def requirements(lines: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in lines}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: requirements(lines) for name, lines in project["optional-dependencies"].items() if name != "dev"}
    always = requirements(project["dependencies"])
    declared = always.union(*extras.values())
    found = {
        (name, path.relative_to(ROOT))
        for path in (ROOT / "src" / "tinypod").rglob("*.py")
        for name in imports(path)
        if name not in sys.stdlib_module_names and name != "tinypod"
    }
    assert len({name for name, _ in found}) > 15
    missing = {
        f"{path}: {name}" for name, path in found if NAMES.get(name, name).lower().replace("_", "-") not in declared
    }
    assert not missing
    for name, extra in IN_ONE_PLACE.items():
        assert name in extras[extra] - always


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "authors"} <= citation.keys()
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])
    assert citation["license"] == project["license"]
