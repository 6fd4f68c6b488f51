"""What `make demo` promises, from the commands that it runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tinypod import cli
from tinypod.cli.demo import make_puzzles
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
    [command] = [line.split()[1:] for line in recipe_of("demo") if line.startswith(".venv/bin/tinypod")]
    assert command == ["demo"]

    def tinypod(*arguments: str) -> str:
        ran = [sys.executable, "-m", "tinypod", *arguments]
        return subprocess.run(ran, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    shown = tinypod(*command)
    scores = json.loads(tinypod("eval", "runs/demo", "--json"))
    assert scores["exact_accuracy"] >= 0.85
    assert scores["count"] == 500
    assert f"It solves {round(500 * scores['exact_accuracy'])} of 500 held-out puzzles" in shown
    assert "wrong at first, refined, and rightly stopped at" in shown
    stops = re.search(r"stopped by itself on (\d+) of 500, .*?; (\d+) of these", " ".join(shown.split()))
    assert stops
    assert int(stops[1]) > 400
    assert int(stops[2]) > 0.7 * int(stops[1])  # it knows: at its first step hardly any are right
    info = puzzles.read_info(tmp_path / "data/demo")
    train, test = (puzzles.read_split(tmp_path / "data/demo", info, name) for name in ("train", "test"))
    signatures = [sudoku.signatures(split.inputs - 1, (2, 3)) for split in (train, test)]
    assert not np.isin(signatures[1], signatures[0]).any()


def test_the_study_of_the_demo_is_made_of_the_same_puzzles(tmp_path: Path) -> None:
    """`make demo-study` and the recipe's comment say how to make by hand what `tinypod demo` makes."""
    [made] = [line for line in recipe_of("demo-study") if "tinypod data sudoku" in line]
    comment = (ROOT / "src/tinypod/configs/demo.yaml").read_text().splitlines()[1]
    arguments = made.split()[1:]
    assert arguments == comment.split()[2:]
    by_hand, by_demo = tmp_path / "by_hand", tmp_path / "by_demo"
    runner = CliRunner()
    arguments[2] = str(by_hand)
    assert runner.invoke(cli.app, arguments).exit_code == 0
    make_puzzles(str(by_demo))
    assert puzzles.read_info(by_hand) == puzzles.read_info(by_demo)  # with the hashes of their contents


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
