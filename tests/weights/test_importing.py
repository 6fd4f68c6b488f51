"""Runs made from weights, and their weights for other programs, by the commands."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from language_models import SHAPE, make_model
from tinypod import cli
from tinypod.cache import build
from tinypod.errors import UserError
from tinypod.weights import hugging_face, language_model, peft
from tinypod.weights.convert import without_adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks, a Hugging Face folder, an adapter for it, and a config."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "text.txt").write_text("a tiny pod. " * 40)
    settings = build.Settings(length=16, held_out=0.2)
    build.build(folder / "blocks", [folder / "text.txt"], "bytes", None, settings, Console(file=StringIO()))
    config, params = make_model(lora={"rank": 2, "targets": ["q", "up"]})
    hugging_face.write_params(folder / "base", *without_adapters(config, params), "float32")
    peft.write_adapter(folder / "adapter", config, params, None)
    tree = {
        "steps": 1,
        "batch_size": 8,
        "mesh": {"devices": 1},
        "compile_cache": None,
        "ema_decay": None,
        "data": {"kind": "blocks", "path": str(folder / "blocks")},
        "model": SHAPE,
        "task": {"kind": "distill", "kd_weight": 0.0, "label_weight": 1.0},
        "optimizer": {"kind": "adamw", "learning_rate": 0.01},
        "eval": {"weights": "live", "batch_size": 8, "every_steps": None},
        "log": {"tensorboard": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["weights", *map(str, arguments)])


def succeed(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_an_adapter_comes_in_and_goes_out(folder: Path, tmp_path: Path) -> None:
    run, base, config = tmp_path / "run", folder / "base", folder / "config.yaml"
    options = ("--adapter", folder / "adapter")
    said = succeed("import", base, config, run, "model.lora={rank: 2, targets: [q, up]}", *options)
    assert "and the adapter of" in said
    said = succeed("export", run, tmp_path / "out", "--format", "peft")
    assert str(base) in said
    one, other = ((x / peft.TENSORS).read_bytes() for x in (folder / "adapter", tmp_path / "out"))
    assert one == other
    with pytest.raises(UserError, match="has adapters of its own; merge them first"):
        raise invoke("import", run, run, tmp_path / "again", *options).exception
    assert not (tmp_path / "again").exists()
    with pytest.raises(UserError, match=r"model\.lora: not set"):
        raise invoke("import", base, config, tmp_path / "again", *options).exception
    succeed("import", run, run, tmp_path / "merged", "model.lora=null")
    before, after = (language_model.load(str(x)).params["layers"]["mlp"] for x in (base, tmp_path / "merged"))
    assert np.array_equal(before["down"]["weight"], after["down"]["weight"])
    assert not np.array_equal(before["up"]["weight"], after["up"]["weight"])
    with pytest.raises(UserError, match="no adapters to write"):
        raise invoke("export", tmp_path / "merged", tmp_path / "none", "--format", "peft").exception
