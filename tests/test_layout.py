"""The map of the package: what lies at its top, which way imports go, and that tests mirror it."""

import ast
from pathlib import Path

import pytest

import tinypod
from fixtures import TESTS

PACKAGE = Path(tinypod.__file__).parent
CORE = {"api", "config", "experiment", "step", "training", "evaluate", "optim", "sharding", "errors"}
# Each line may import the ones before it. `runs.storage`, `runs.terminal` and `runs.headline` know nothing of the rest.
LAYERS = [
    {"errors"},
    {"config", "runs.storage", "runs.terminal", "runs.headline"},
    {"sharding", "optim"},
    {"kernels"},
    {"models", "data"},
    {"tasks"},
    {"step", "evaluate"},
    {"experiment"},
    {"runs", "health", "cluster"},
    {"training", "weights"},
    {"check", "planning", "solve", "generate", "cache"},
    {"study"},
    {"pod", "view"},
    {"api"},
    {"cli"},
]
MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module: str) -> int:
    """Of a module by its dotted name below the package; the longest name that is listed counts."""
    parts = module.split(".")
    for length in (2, 1):
        for number, layer in enumerate(LAYERS):
            if ".".join(parts[:length]) in layer:
                return number
    raise AssertionError(f"{module} is in no layer")


def imported(path: Path) -> set[str]:
    """The package's modules that a file imports, at its top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tinypod":
            base = node.module.removeprefix("tinypod").removeprefix(".")
            for name in node.names:
                dotted = f"{base}.{name.name}".strip(".")
                is_module = (PACKAGE / dotted.replace(".", "/")).with_suffix(".py").exists()
                is_folder = (PACKAGE / dotted.replace(".", "/")).is_dir()
                found.add(dotted if is_module or is_folder else base)
    return found - {""}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def test_nothing_but_the_core_lies_at_the_top() -> None:
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert files == CORE


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    name = name_of(path)
    if name in ("__init__", "__main__"):
        return
    for other in imported(path):
        assert layer_of(other) <= layer_of(name), f"{name} imports {other}"


def test_there_is_no_circle() -> None:
    graph = {name_of(path): imported(path) for path in MODULES}
    done: set[str] = set()

    def visit(name: str, chain: tuple[str, ...]) -> None:
        assert name not in chain, " -> ".join((*chain, name))
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*chain, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_core_knows_no_puzzle() -> None:
    """Only data, models, tasks, solve and weights may; and the commands that are about puzzles."""
    about_puzzles = {"data", "models.trm", "tasks.puzzle", "tasks.puzzle_scores"}
    for path in MODULES:
        name = name_of(path)
        if name.split(".")[0] in ("data", "models", "tasks", "solve", "generate", "weights", "cache") or name in (
            "api",
            "cli.data",
            "cli.demo",
            "cli.cache",
        ):
            continue
        known = {other for other in imported(path) if other in about_puzzles or other.split(".")[0] == "data"}
        assert not known, f"{name} imports {known}"


def test_tests_mirror_the_package() -> None:
    without_code = ("configs", "releases", "__pycache__")
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in without_code}
    mirrored = {path.name for path in TESTS.iterdir() if path.is_dir()}
    assert folders <= mirrored
