"""What a cache keeps: fewer blocks, and of a teacher's logits as much as float16 can hold."""

from io import StringIO
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tinypod import cli, sharding
from tinypod.cache.build import Settings, build
from tinypod.data import blocks
from tinypod.errors import UserError
from tinypod.models import qwen3
from tinypod.tasks.distill_losses import row_sums
from tinypod.weights.language_model import LanguageModel

QUIET = Console(file=StringIO())


def test_fewer_blocks_to_train_on_leave_those_held_out_as_they_are(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} " for number in range(500)))
    found = {}
    for limit in (None, 7, 10**6):
        settings = Settings(length=16, held_out=0.1, blocks=limit)
        manifest = build(tmp_path / str(limit), [text], "bytes", None, settings, QUIET)
        for split in manifest.splits:
            read = blocks.Blocks(tmp_path / str(limit), manifest, split)
            found[limit, split] = read.read(range(len(read)))["input_ids"]
    assert len(found[7, "train"]) == 7
    np.testing.assert_array_equal(found[7, "train"], found[None, "train"][:7])
    np.testing.assert_array_equal(found[7, "held_out"], found[None, "held_out"])
    np.testing.assert_array_equal(found[10**6, "train"], found[None, "train"])


def test_without_adapters_needs_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    result = CliRunner().invoke(
        cli.app, ["cache", "build", str(tmp_path / "c"), str(tmp_path / "text.txt"), "--without-adapters"]
    )
    assert isinstance(result.exception, UserError)
    with pytest.raises(UserError, match="name the run with --teacher"):
        raise result.exception


def test_a_teacher_that_is_sure_has_no_loss_against_its_own_cache(tmp_path: Path) -> None:
    """Logits of 15 as float16 are off by up to 0.004: mass that the tail would have to make up for."""
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 32}
    config = qwen3.Qwen3Config(vocab_size=264, dtype="float32", **sizes)
    params = jax.jit(lambda: qwen3.init(config, jax.random.key(0)))()
    params["embed"] = params["embed"] * 80
    mesh = sharding.make_mesh(sharding.MeshConfig(devices=1))
    specs = sharding.param_specs(qwen3.sharding_rules(config), params, mesh)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} " for number in range(100)))
    settings = Settings(length=16, topk=8, held_out=0.0, stretch=4)
    manifest = build(tmp_path / "c", [text], "bytes", LanguageModel("t", config, params, mesh, specs), settings, QUIET)
    read = blocks.Blocks(tmp_path / "c", manifest, "train")
    rows = read.read(range(len(read)))
    known = {"labels": rows["input_ids"][:, 1:], "logz": rows["logz"][..., 0]}
    known |= {name: rows[name] for name in ("topk_idx", "topk_logits")}

    @jax.jit
    def score(params: qwen3.Params) -> dict[str, jax.Array]:
        hidden = qwen3.apply(config, params, rows["input_ids"])[:, :-1]
        return row_sums(hidden, qwen3.head_weight(config, params), known, np.ones_like(known["labels"]), 8, "tail", 1.0)

    sums = score(params)
    assert (rows["topk_logits"][..., 0] - rows["topk_logits"][..., 1]).mean() > 1  # it is sure
    assert abs(float(sums["kd_loss"].sum() / sums["tokens"].sum())) < 1e-5
