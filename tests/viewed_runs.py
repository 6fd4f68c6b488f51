"""Runs to be looked at: one that was trained, one that seems to be another, and some whose names mean harm."""

import io
import shutil
from pathlib import Path

from rich.console import Console

from fixtures import tiny_config, write_4x4
from tinypod import training
from tinypod.runs.folder import Run

MARKUP = "<img src=x onerror=alert(1)>"
ESCAPES = "..%2f..%2fetc"


def make_runs(folder: Path) -> Path:
    """`folder/runs` with `first` (trained), `second` (a copy with another learning rate), and the hostile ones."""
    runs = folder / "runs"
    training.train(tiny_config(write_4x4(folder / "data")), Run(runs / "first"), Console(file=io.StringIO()))
    for name in ("second", MARKUP, ESCAPES):
        shutil.copytree(runs / "first", runs / name)
    config = runs / "second" / "config.yaml"
    text = config.read_text()
    assert "learning_rate: 0.001" in text
    config.write_text(text.replace("learning_rate: 0.001", "learning_rate: 0.002", 1))
    return runs
