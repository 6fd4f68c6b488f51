"""A text that every machine with Python has: the docstrings of its standard library, and what `help()` prints of its
topics. One document a line, as JSON; a module is a document. About 2 MB, a little different for each Python."""

import ast
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


def documents() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(library).parts) and (text := docstrings(path)):
            yield text
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions pack it apart
        return
    yield from (topics[name] for name in sorted(topics))


def docstrings(path: Path) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ""
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(text for text in found if text)


def write(path: Path) -> None:
    """Whole, or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    partial.replace(path)
