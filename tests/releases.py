"""A trained run, and releases of it."""

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fixtures import tiny_config, write_4x4
from tinypod import cli, training
from tinypod.runs import release
from tinypod.runs.folder import Run

EXAMPLES = ["12..34..........", "....12..34......"]


def train_run(folder: Path, *overrides: str) -> Path:
    """`folder/run`, on the puzzles of `folder/data`."""
    config = tiny_config(write_4x4(folder / "data"), "steps=5", *overrides)
    training.train(config, Run(folder / "run"), Console(quiet=True))
    return folder / "run"


def export(run: Path, out: Path, *options: str) -> str:
    """What the command says."""
    done = CliRunner().invoke(cli.app, ["weights", "export", str(run), str(out), "--format", "release", *options])
    if done.exception is not None:
        raise done.exception
    return done.output


def empty_shelf(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the package's releases; and the process in a folder with nothing in it, as on a fresh clone."""
    shelf, work = folder / "shelf", folder / "work"
    shelf.mkdir()
    work.mkdir()
    monkeypatch.setattr(release, "RELEASES", shelf)
    monkeypatch.chdir(work)
    return shelf
