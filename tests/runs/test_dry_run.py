"""What a dry run says, before a run and of one that is there."""

from pathlib import Path

import pytest
from rich.console import Console

from fixtures import tiny_config, write_4x4
from tinypod import config, training
from tinypod.errors import CheckpointError, ConfigError
from tinypod.experiment import ExperimentConfig
from tinypod.runs.dry_run import describe
from tinypod.runs.folder import Run


def notes(text: str) -> list[str]:
    return [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]


def test_it_is_the_config_that_a_new_run_would_store(tmp_path: Path) -> None:
    wanted = tiny_config(write_4x4(tmp_path / "data"), "optimizer.schedule.warmup_steps=20")
    text = describe(wanted, Run(tmp_path / "run"))
    (tmp_path / "shown.yaml").write_text(text)
    assert config.load(tmp_path / "shown.yaml", [], ExperimentConfig) == wanted
    said = notes(text)
    assert "data:   40 training and 21 held-out puzzles" in said
    assert "mesh:   8 × cpu (data 8), 2 rows per device" in said
    assert "steps:  0 to 10" in said
    assert f"writes: {tmp_path / 'run'}/ (a new run)" in said
    assert "  checkpoints/: every 5 steps or 10 minutes, and at the end; keeps the last 2 and the best" in said
    assert any(line.startswith("warning: optimizer.schedule.warmup_steps=20 is longer than the run") for line in said)
    assert not (tmp_path / "run").exists()


def test_it_says_where_a_run_would_resume_and_what_changes(tmp_path: Path) -> None:
    data = write_4x4(tmp_path / "data")
    run = Run(tmp_path / "run")
    training.train(tiny_config(data), run, Console(quiet=True))
    said = notes(describe(tiny_config(data, "steps=12"), run))
    assert "steps:  10 to 12" in said
    assert f"writes: {run}/ (resumed from step 10)" in said
    assert "change: steps: 10 -> 12" in said
    assert "steps:  5 to 12" in notes(describe(tiny_config(data, "steps=12"), run, from_step=5))
    assert "steps:  nothing left to do" in notes(describe(tiny_config(data), run))
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are: 5, 10"):
        describe(tiny_config(data, "steps=12"), run, from_step=7)
    with pytest.raises(ConfigError, match="another model"):
        describe(tiny_config(data, "steps=12", "model.hidden_size=32"), run)
    with pytest.raises(ConfigError, match="do not divide over 8 devices"):
        describe(tiny_config(data, "batch_size=12"), Run(tmp_path / "new"))
