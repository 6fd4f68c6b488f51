"""The fault harness in short: a few faults, judged like the two hundred of docs/reliability.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[1] / "benchmarks" / "faults"


@pytest.mark.slow
def test_runs_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """SIGKILL during a save, SIGTERM to the command and to all at once, and a checkpoint that is cut in half."""
    kinds = ("kill_in_save", "sigterm", "sigterm_group", "truncate")
    options = ["--kinds", ",".join(kinds), "--faults", "1", "--a-run", "1", "--steps", "120", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, HARNESS, *options], capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    results = {result["name"].split("-")[0]: result for result in map(json.loads, lines)}
    assert results.keys() == set(kinds)
    for result in results.values():
        assert result["right"], result
        assert result["bad_checkpoints"] == []
        assert result["hand"] == ""
        assert [fault["kind"] for fault in result["faults"]] == [result["name"].split("-")[0]]
    for kind in ("sigterm", "sigterm_group"):
        assert [fault["lost_steps"] for fault in results[kind]["faults"]] == [0]
    assert all(fault["lost_steps"] > 0 for fault in results["truncate"]["faults"])
