"""Caches that another program wrote with torch, as ours."""

import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from language_models import SHAPE
from tinypod import cli
from tinypod import config as configs
from tinypod.cache import torch_shards
from tinypod.data import blocks
from tinypod.errors import ConfigError, DataError, UserError
from tinypod.experiment import ExperimentConfig, build
from tinypod.runs.folder import Run
from tinypod.training import train

LENGTH, TOPK = 12, 4
META = {
    "format": "qwen_kd_topk_cache_v1",
    "teacher_model": "Qwen/Qwen3-32B",
    "tokenizer": "Qwen/Qwen3-0.6B",
    "dataset_name": "Salesforce/wikitext",
    "dataset_split": "train",
    "vocab_size": 264,
}


def make_shard(count: int, seed: int, **changes: Any) -> dict[str, Any]:
    """As that program writes it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, LENGTH - 1, 264, generator=generator) * 5
    values, indices = logits.topk(TOPK)
    return {
        "input_ids": torch.randint(0, 264, (count, LENGTH), generator=generator, dtype=torch.int32),
        "attention_mask": torch.ones(count, LENGTH, dtype=torch.uint8),
        "topk_idx": indices.int(),
        "topk_logits": values.half(),
        "rand_idx": torch.zeros(count, LENGTH - 1, 3, dtype=torch.int32),
        "rand_logits": torch.zeros(count, LENGTH - 1, 3, dtype=torch.float16),
    } | changes


def write_cache(folder: Path, *shards: dict[str, Any], **meta: Any) -> Path:
    folder.mkdir()
    for number, shard in enumerate(shards):
        torch.save(shard, folder / f"shard_{number:05d}.pt")
    (folder / "meta.json").write_text(json.dumps(META | meta))
    (folder / "progress.json").write_text(json.dumps({"n_written": 20, "done": True}))
    return folder


def run_import(source: Path, out: Path, **options: Any) -> tuple[blocks.Manifest, str]:
    said = StringIO()
    manifest = torch_shards.import_cache(source, out, Console(file=said, width=200), held_out=0.2, **options)
    return manifest, said.getvalue()


def read_all(folder: Path) -> dict[str, np.ndarray]:
    manifest = blocks.read_manifest(folder)
    parts = [blocks.Blocks(folder, manifest, split) for split in manifest.splits]
    read = [part.read(range(len(part))) for part in parts]
    return {name: np.concatenate([part[name] for part in read]) for name in read[0]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "theirs", make_shard(8, 1), make_shard(8, 2), make_shard(4, 3))


def test_every_value_is_taken_over(source: Path, tmp_path: Path) -> None:
    manifest, said = run_import(source, tmp_path / "ours")
    assert "rand_idx, rand_logits are left out" in said
    assert "task.kd=renormalised" in said
    assert "repeats" not in said
    shards = [torch.load(source / f"shard_{number:05d}.pt") for number in range(3)]
    found = read_all(tmp_path / "ours")
    assert set(found) == {"input_ids", "topk_idx", "topk_logits"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, np.concatenate([shard[name].numpy() for shard in shards]), err_msg=name)
    assert {name: manifest.count(name) for name in manifest.splits} == {"train": 16, "held_out": 4}
    assert manifest.teacher == blocks.Teacher(name="Qwen/Qwen3-32B", topk=TOPK, temperatures=[])
    assert blocks.verify(tmp_path / "ours", manifest) == []
    shown = CliRunner().invoke(cli.app, ["cache", "inspect", str(tmp_path / "ours")])
    assert shown.exit_code == 0, shown.exception
    assert "no normalisers" in shown.output
    assert "begins: tokens" in shown.output
    command = ["cache", "import", str(source), str(tmp_path / "bytes"), "--tokenizer", "bytes"]
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    assert "begins: '" in CliRunner().invoke(cli.app, ["cache", "inspect", str(tmp_path / "bytes")]).output


def test_other_names_masks_and_orders(tmp_path: Path) -> None:
    plain, other = make_shard(5, 1), make_shard(5, 2)
    mask = torch.ones(5, LENGTH, dtype=torch.uint8)
    mask[1, 7:] = 0
    renamed = {"ids": other["input_ids"].long(), "topk_indices": other["topk_idx"].flip(-1), "attention_mask": mask}
    renamed["topk_logits"] = other["topk_logits"].float().flip(-1)
    without = {key: value for key, value in plain.items() if key != "attention_mask"}
    run_import(write_cache(tmp_path / "theirs", without, renamed), tmp_path / "ours")
    found = read_all(tmp_path / "ours")
    np.testing.assert_array_equal(found["mask"], np.concatenate([np.ones((5, LENGTH)), mask.numpy()]))
    for name in ("input_ids", "topk_idx", "topk_logits"):
        np.testing.assert_array_equal(found[name], torch.cat([plain[name], other[name]]).numpy(), err_msg=name)


def test_an_import_that_was_cut_off_continues(source: Path, tmp_path: Path) -> None:
    second = source / "shard_00001.pt"
    whole, out = second.read_bytes(), tmp_path / "ours"
    end = whole.index(torch.load(second)["topk_logits"].numpy().tobytes())
    second.write_bytes(whole[:end] + b"damaged!" + whole[end + 8 :])
    with pytest.raises(DataError, match=r"shard_00001\.pt.*damaged"):
        run_import(source, out)
    assert not (out / blocks.MANIFEST).exists()
    first = out / "train_00000.safetensors"
    written = first.stat().st_mtime_ns
    second.write_bytes(whole)
    run_import(source, out)
    assert first.stat().st_mtime_ns == written
    run_import(source, tmp_path / "straight")
    assert (out / blocks.MANIFEST).read_bytes() == (tmp_path / "straight" / blocks.MANIFEST).read_bytes()
    with pytest.raises(UserError, match="already holds a cache"):
        run_import(source, out)
    (out / blocks.MANIFEST).unlink()
    torch.save(make_shard(4, 9), source / "shard_00002.pt")
    with pytest.raises(UserError, match="the beginning of another cache"):
        run_import(source, out)


def test_blocks_that_are_there_twice_are_reported(tmp_path: Path) -> None:
    _, said = run_import(write_cache(tmp_path / "theirs", make_shard(8, 1), make_shard(8, 1)), tmp_path / "ours")
    assert "3 of the held-out blocks are among those to train on" in said


class Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_logits": torch.zeros(4, LENGTH - 1, TOPK + 1)}, r"topk_logits is \[4, 11, 5\], expected \[4, 11, 4\]"),
        ({"topk_idx": torch.zeros(4, LENGTH, TOPK).int()}, r"topk_idx is \[4, 12, 4\], expected \[4, 11, 4\]"),
        ({"attention_mask": torch.ones(4, 3)}, r"attention_mask is \[4, 3\]"),
        ({"input_ids": torch.ones(4).int()}, r"input_ids is \[4\], expected \[blocks, tokens\]"),
        ({"input_ids": torch.full((4, LENGTH), 264).int()}, "input_ids go from 264 to 264; the vocabulary has 264"),
        ({"input_ids": torch.ones(4, LENGTH)}, "input_ids are float32, expected integers"),
        ({"topk_logits": torch.full((4, LENGTH - 1, TOPK), torch.nan)}, "topk_logits are not all finite floats"),
        ({"topk_idx": None}, "no topk_idx; it has input_ids"),
        ({"note": Payload("touch {trap}")}, r"it asks for \w+\.system, which no file of plain tensors needs"),
    ],
)
def test_a_shard_that_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    trap = tmp_path / "trap"
    if "note" in changes:
        changes = {"note": Payload(f"touch {trap}")}
    source = write_cache(tmp_path / "theirs", make_shard(4, 1), make_shard(4, 2, **changes))
    with pytest.raises(DataError, match=rf"shard_00001\.pt: {message}"):
        run_import(source, tmp_path / "ours")
    assert not trap.exists()
    assert not (tmp_path / "ours" / blocks.MANIFEST).exists()


def test_folders_that_cannot_be_used(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no shard_00000\.pt"):
        run_import(tmp_path, tmp_path / "ours")
    (source / "progress.json").write_text('{"n_written": 8, "done": false}')
    (source / "meta.json").unlink()
    with pytest.raises(DataError, match="--vocab-size"):
        run_import(source, tmp_path / "ours")
    assert "is not complete" in run_import(source, tmp_path / "ours", vocab_size=300)[1]
    assert blocks.read_manifest(tmp_path / "ours").vocab_size == 300
    torch.save(
        make_shard(4, 3, topk_idx=torch.zeros(4, 11, 2).int(), topk_logits=torch.zeros(4, 11, 2)),
        source / "shard_00002.pt",
    )
    with pytest.raises(DataError, match=r"shard_00002\.pt: blocks of 12 tokens with 2 logits per position"):
        run_import(source, tmp_path / "other", vocab_size=300)
    (source / "shard_00001.pt").unlink()
    with pytest.raises(DataError, match=r"shard 1 is missing; the next one is shard_00002\.pt"):
        run_import(source, tmp_path / "other", vocab_size=300)


@pytest.mark.slow
def test_it_trains_with_the_renormalised_loss_alone(source: Path, tmp_path: Path) -> None:
    run_import(source, tmp_path / "ours")
    tree: dict[str, Any] = {
        "steps": 1,
        "batch_size": 8,
        "mesh": {"devices": 1},
        "ema_decay": None,
        "data": {"kind": "blocks", "path": str(tmp_path / "ours")},
        "model": SHAPE | {"num_layers": 1},
        "task": {"kind": "distill", "kd": "renormalised", "temperature": 1.5, "top1_weight": 0.1},
        "optimizer": {"kind": "adamw", "learning_rate": 0.01},
        "eval": {"weights": "live", "batch_size": 8, "every_steps": None},
        "log": {"tensorboard": False},
    }
    config = configs.validate(tree, ExperimentConfig, "test")
    train(config, Run(tmp_path / "run"), Console(file=StringIO()))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 1
    assert any(0 < record.get("train/kd_loss", 0) < 50 for record in records)
    tree["task"]["kd"] = "tail"
    with pytest.raises(ConfigError, match=r"use task\.kd=renormalised"):
        build(configs.validate(tree, ExperimentConfig, "test"))
