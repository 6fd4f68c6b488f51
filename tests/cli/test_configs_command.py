"""`tinypod configs`: what is shipped, and where each key of a config comes from."""

import json
from pathlib import Path

import yaml
from typer.testing import CliRunner

from tinypod import cli
from tinypod.config import load
from tinypod.errors import UserError
from tinypod.experiment import ExperimentConfig

runner = CliRunner()


def ok(*arguments: object) -> str:
    result = runner.invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_the_list_has_every_recipe_and_study_within_80_columns() -> None:
    lines = ok("configs").splitlines()
    assert max(map(len, lines)) <= 80
    counts = {line.split()[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    assert (counts["demo"], counts["trm/sudoku_mlp"], counts["studies/demo"]) == ("1,200", "65,104", "12")
    assert "base" not in counts


def test_each_key_names_the_file_that_it_comes_from(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    base = Path(cli.__file__).parents[1] / "configs" / "demo.yaml"
    mine.write_text(f"defaults: [{base}]\nbatch_size: 64\noptimizer: {{schedule: {{kind: constant}}}}\n")
    found = json.loads(ok("configs", mine, "steps=20", "model.mixing={kind: attention}", "--json"))
    assert found["steps"] == [20, "command line"]
    assert found["batch_size"] == [64, "mine.yaml"]
    assert found["ema_decay"] == [0.995, "demo.yaml"]
    assert found["accumulation"] == [1, "base.yaml"]
    assert found["health.heartbeat_s"][1] == "default"
    # Another kind replaces the whole mapping: nothing in it comes from the files below any more.
    assert found["optimizer.schedule.kind"] == ["constant", "mine.yaml"]
    assert found["optimizer.schedule.warmup_steps"] == [0, "default"]
    assert found["model.mixing.kind"] == ["attention", "command line"]
    assert found["model.mixing.num_heads"][1] == "default"


def test_what_is_printed_is_the_same_config(tmp_path: Path) -> None:
    for name in ("demo", "trm/sudoku_attention", "distill/demo_lora"):
        text = ok("configs", name)
        expected = load(name, [], ExperimentConfig)
        assert yaml.safe_load(text) == expected.model_dump(mode="json")
        copy = tmp_path / "copy.yaml"
        copy.write_text(text)
        assert load(copy, [], ExperimentConfig) == expected
        assert all("  # " in line or line.endswith(":") for line in text.splitlines())


def test_a_study_is_printed_as_it_is_with_its_runs() -> None:
    text = ok("configs", "studies/width")
    assert yaml.safe_load(text)["factors"] == {"model.hidden_size": [32, 64, 96, 128]}
    assert "# 12 runs" in text


def test_near_misses_are_suggested() -> None:
    for wrong, right in (("demmo", "demo"), ("sudoku_mlp", "trm/sudoku_mlp"), ("with", "studies/width")):
        for command in (["configs"], ["train"], ["study", "run"]):
            error = runner.invoke(cli.app, [*command, wrong]).exception
            assert isinstance(error, UserError)
            assert f"did you mean the recipe `{right}`?" in str(error)
