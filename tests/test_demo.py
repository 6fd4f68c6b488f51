"""What `make demo` promises, from the commands that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tinypod.data import puzzles, sudoku

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_demo_solves_held_out_puzzles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name, raising=False)  # as on a user's machine
    recipe = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    commands = [line.split()[1:] for line in recipe.splitlines() if line.startswith(".venv/bin/tinypod")]
    assert [command[0] for command in commands] == ["data", "train", "eval", "solve"]
    commands[2].append("--json")
    outputs = [
        subprocess.run(
            [sys.executable, "-m", "tinypod", *c], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for c in commands
    ]
    scores = json.loads(outputs[2])
    assert scores["exact_accuracy"] >= 0.95
    assert scores["count"] == 500
    assert "solved at step" in outputs[3]
    info = puzzles.read_info(tmp_path / "data/demo")
    train, test = (puzzles.read_split(tmp_path / "data/demo", info, name) for name in ("train", "test"))
    signatures = [sudoku.signatures(split.inputs - 1, (2, 3)) for split in (train, test)]
    assert not np.isin(signatures[1], signatures[0]).any()
