"""Runs made from weights, and their weights for other programs, by the commands."""

import re
from io import StringIO
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from fixtures import tiny_config, write_4x4
from language_models import SHAPE, make_model
from tinypod import cli
from tinypod.cache import build
from tinypod.config import load
from tinypod.errors import UserError
from tinypod.experiment import ExperimentConfig
from tinypod.models.trm import PuzzleShape, TrmConfig, init
from tinypod.runs.folder import Run
from tinypod.training import train
from tinypod.weights import hugging_face, language_model, packed, peft
from tinypod.weights.convert import without_adapters
from tinypod.weights.exporting import write_weights
from tinypod.weights.importing import create_run

QUIET = Console(file=StringIO())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks, a Hugging Face folder, an adapter for it, and a config."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "text.txt").write_text("a tiny pod. " * 40)
    settings = build.Settings(length=16, held_out=0.2)
    build.build(folder / "blocks", [folder / "text.txt"], "bytes", None, settings, QUIET)
    config, params = make_model(lora={"rank": 2, "targets": ["q", "up"]})
    hugging_face.write_params(folder / "base", *without_adapters(config, params), "float32")
    peft.write_adapter(folder / "adapter", config, params, None)
    tree = {
        "steps": 1,
        "batch_size": 8,
        "mesh": {"devices": 1},
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


@pytest.mark.slow
def test_packed_weights_come_in_teach_and_go_out(folder: Path, tmp_path: Path) -> None:
    run, config, given = tmp_path / "run", folder / "config.yaml", tmp_path / "given"
    packed.write(given, *make_model(low_bit="q4a4"), "float32")
    succeed("import", given, config, run, "model.low_bit=q4a4")
    said = succeed("export", run, tmp_path / "again", "--format", "packed", "--dtype", "float32")
    assert "bits per weight" in said
    assert (given / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
    teacher = language_model.load(str(given), "dtype=float32")
    settings = build.Settings(length=16, topk=3, held_out=0.2)
    manifest = build.build(tmp_path / "cache", [folder / "text.txt"], "bytes", teacher, settings, QUIET)
    assert manifest.teacher is not None
    assert manifest.teacher.name == str(given)


@pytest.mark.slow
def test_snapped_magnitudes_are_halves_and_stay(folder: Path, tmp_path: Path) -> None:
    run, config, given = tmp_path / "run", folder / "config.yaml", tmp_path / "given"
    packed.write(given, *make_model(low_bit="q4a4"), "float32")
    said = succeed("import", given, config, run, "model.low_bit=q4a4", "task.train.magnitudes=0", "--snap")
    changed = float(re.search(r"relative change of one is (\S+)\. Train", " ".join(said.split()))[1])
    assert 2**-14 < changed <= 2**-11
    _, before = packed.read(given)
    train(load(run / "config.yaml", [], ExperimentConfig), Run(run), QUIET)
    after = language_model.load(str(run), checkpoint="latest").params
    for group, name in (("attention", "q"), ("mlp", "down")):
        old, new = before["layers"][group][name], after["layers"][group][name]
        np.testing.assert_array_equal(np.asarray(new["g"]), old["g"].astype(np.float16).astype(np.float32))
        assert not np.array_equal(np.asarray(new["A"]), old["A"])
    with pytest.raises(UserError, match=r"set model\.low_bit"):
        raise invoke("import", folder / "base", config, tmp_path / "plain", "--snap").exception


def test_a_puzzle_model_has_one_format() -> None:
    fields = {"hidden_size": 8, "num_layers": 1, "H_cycles": 1, "L_cycles": 1, "puzzle_embedding": {"kind": "none"}}
    model = TrmConfig.model_validate(fields | {"mixing": {"kind": "mlp"}})
    for options in ({"format": "packed"}, {"format": "hugging_face"}, {"dtype": "float32"}, {"base": Path("x")}):
        with pytest.raises(UserError, match="are for language models; a trm is written"):
            write_weights(Path("nowhere"), model, {}, **options)


def test_a_gate_that_the_authors_do_not_have_neither_goes_out_nor_comes_in(tmp_path: Path) -> None:
    data = write_4x4(tmp_path / "data")
    config = tiny_config(data, "model.gate=normalised")
    params = init(config.model, PuzzleShape(16, 6, 1), jax.random.key(0))
    out = tmp_path / "theirs.pt"
    with pytest.raises(UserError, match=r"model\.gate=normalised.*model\.gate=swiglu alone"):
        write_weights(out, config.model, params)
    assert not out.exists()
    write_weights(out, config.model.model_copy(update={"gate": "swiglu"}), params)
    with pytest.raises(UserError, match=r"model\.gate=normalised"):
        create_run(Run(tmp_path / "run"), config, str(out))
    assert not (tmp_path / "run" / "config.yaml").exists()
    create_run(Run(tmp_path / "run"), tiny_config(data), str(out))
