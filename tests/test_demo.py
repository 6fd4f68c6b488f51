"""What `make demo` promises, from the commands that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tinypod.data import puzzles, sudoku

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def as_on_a_users_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name, raising=False)


def recipe_of(target: str) -> list[str]:
    """The commands that `make` would run."""
    ran = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(ran, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.slow
def test_the_demo_solves_held_out_puzzles(tmp_path: Path) -> None:
    commands = [line.split()[1:] for line in recipe_of("demo") if line.startswith(".venv/bin/tinypod")]
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


@pytest.mark.slow
def test_the_demo_of_distillation_ends_in_a_table_and_repeats_nothing(tmp_path: Path) -> None:
    program, script = recipe_of("demo-distill")[-1].split()
    assert program == ".venv/bin/python"
    small = ["steps=60", "batch_size=8", "model.hidden_size=64", "model.num_layers=1"]
    command = [sys.executable, str(ROOT / script), "--folder", "out", "--blocks", "200", *small]

    def run() -> str:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    shown = run()
    stages = ("teacher", "4bit_quantised", "4bit_recovered", "2bit_quantised", "2bit_recovered", "2bit_lora")
    scores = {name: json.loads((tmp_path / "out" / "scores" / f"{name}.json").read_text()) for name in stages}
    perplexity, kd = ({name: x[key] for name, x in scores.items()} for key in ("perplexity", "kd_loss"))
    assert perplexity["teacher"] < 60  # of 257 bytes
    # After so few steps, and on another Python's docstrings, only differences of several times are sure.
    assert abs(kd["teacher"]) < 1e-6 < kd["4bit_quantised"] < kd["2bit_quantised"]
    assert max(kd["2bit_recovered"], kd["2bit_lora"]) < 0.7 * kd["2bit_quantised"]
    table = shown[shown.index("Held-out text") :]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert f"{perplexity['2bit_lora']:.3f}" in table
    assert run() == table
    # Stopped before its last stage, it repeats that one alone.
    (tmp_path / "out" / "scores" / "2bit_lora.json").unlink()
    again = run()
    assert [line.split()[1] for line in again.splitlines() if line.startswith("tinypod ")] == ["train", "eval"]
    assert again.endswith(table)
