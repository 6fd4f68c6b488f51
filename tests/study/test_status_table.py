"""How the runs of a study stand, on screens of 80 and 60 columns."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from synthetic_study import grid, rising, write_study
from tinypod.study.status import table

REASON = "loss or gradients were not finite in the last 10 steps"


@pytest.mark.parametrize("width", [80, 60])
def test_names_states_and_numbers_stay_whole(tmp_path: Path, width: int) -> None:
    runs = grid({"model.hidden_size": [64, 128], "optimizer.learning_rate": [1e-4, 4e-4]}, seeds=2)
    diverged = {runs[3]["name"]: {"state": "diverged", "reason": REASON, "step": 1_120}}
    folder = write_study(tmp_path, runs, lambda run: rising(0.9), steps=2_000, outcomes=diverged)
    console = Console(file=io.StringIO(), width=width)
    console.print(table(folder))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for whole in [*(run["name"] for run in runs), "diverged", "1,120", "90.00%"]:
        assert any(whole in line for line in lines), (whole, text)
    assert all(word in text.split() for word in REASON.split())
