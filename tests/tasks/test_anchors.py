"""Anchors: rows of a batch that hold a student near what it was, against a computation by hand."""

import itertools
import json
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from fixtures import Steps
from tinypod import config as configs
from tinypod import sharding
from tinypod.cache import build as caches
from tinypod.data import blocks
from tinypod.errors import ConfigError, DataError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.models import qwen3
from tinypod.runs.checksums import flatten
from tinypod.runs.folder import Run
from tinypod.runs.saver import open_checkpoints
from tinypod.step import bind_loss, differentiated
from tinypod.training import train
from tinypod.weights import language_model
from tinypod.weights.importing import create_run
from tinypod.weights.language_model import LanguageModel

QUIET = Console(file=StringIO())
TEXT = " ".join(f"{number} times {number} is {number * number}." for number in range(200))
MODEL: dict[str, Any] = {
    "kind": "qwen3",
    "vocab_size": 264,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 32,
    "dtype": "float32",
    "lora": {"rank": 2},
}
SETTINGS = caches.Settings(length=12, topk=5, held_out=0.1, shard_blocks=50, batch_size=16, stretch=4)
ANCHORS = 3  # fewer than two batches use, so that they come round again


def make_config(folder: Path, *overrides: str, anchored: bool = True) -> ExperimentConfig:
    anchor = {"path": str(folder / "anchors"), "every": 4, "weight": 0.5} if anchored else None
    tree: dict[str, Any] = {
        "steps": 4,
        "batch_size": 8 if anchored else 6,
        "mesh": {"devices": 1},
        "ema_decay": None,
        "data": {"kind": "blocks", "path": str(folder / "cache")},
        "model": MODEL,
        "task": {"kind": "distill", "stretch": 5, "temperature": 2.0, "top1_weight": 0.3, "anchor": anchor},
        "optimizer": {"kind": "adamw", "learning_rate": 0.05},
        "eval": {"weights": "live", "batch_size": 8, "every_steps": None},
        "checkpoint": {"every_steps": 2, "every_minutes": None},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    for text in overrides:
        tree = configs.merge(tree, configs.parse_override(text))
    return configs.validate(json.loads(json.dumps(tree)), ExperimentConfig, "test")


def make_model(seed: int, **changes: Any) -> LanguageModel:
    """Random weights, large enough that the model is sure of something."""
    config = qwen3.Qwen3Config(**MODEL | changes)
    mesh = sharding.make_mesh(sharding.MeshConfig(devices=1))
    params = jax.jit(lambda: qwen3.init(config, jax.random.key(seed)))()
    params["embed"] = params["embed"] * 20
    specs = sharding.param_specs(qwen3.sharding_rules(config), params, mesh)
    return LanguageModel(f"seed {seed}", config, params, mesh, specs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher's cache, and one of another's anchors."""
    made = tmp_path_factory.mktemp("anchors")
    (made / "text.txt").write_text(TEXT)
    (made / "other.txt").write_text(TEXT[::-1])
    caches.build(made / "cache", [made / "text.txt"], "bytes", make_model(1), SETTINGS, QUIET)
    few = SETTINGS._replace(held_out=0.0, blocks=ANCHORS)
    caches.build(made / "anchors", [made / "other.txt"], "bytes", make_model(2), few, QUIET)
    return made


def rows_of(folder: Path, numbers: Any) -> dict[str, np.ndarray]:
    return blocks.Blocks(folder, blocks.read_manifest(folder), "train").read(numbers)


def divergence(logits: np.ndarray, rows: dict[str, np.ndarray], temperature: float) -> float:
    """KL of K + 1 outcomes, summed over positions, from the definition."""
    total = 0.0
    for row, position in np.ndindex(*rows["topk_idx"].shape[:2]):
        p = np.exp(rows["topk_logits"][row, position].astype(np.float64) / temperature - rows["logz"][row, position, 1])
        q = np.exp(logits[row, position] / temperature)
        q = (q / q.sum())[rows["topk_idx"][row, position]]
        p, q = (np.append(x, 1 - x.sum()) for x in (p, q))
        total += temperature**2 * float(np.sum(p * (np.log(p) - np.log(q))))
    return total


def test_the_loss_is_that_of_the_definition(folder: Path) -> None:
    experiment = build(make_config(folder))
    state, task = experiment.init(), experiment.task
    batch = task.open_feed(experiment.mesh)(1)
    model = experiment.config.model
    varied = {name: np.float32(x) for name, x in task.varied.items()}
    _, (_, sums) = jax.jit(task.loss)(state.params, {}, {}, batch, varied)
    order = blocks.shuffled(0, 0, blocks.read_manifest(folder / "cache").count("train"))
    trained = rows_of(folder / "cache", order[6:12])  # batch 1 of 6 rows
    held = rows_of(folder / "anchors", [2, 0])  # batch 0 had 0 and 1
    np.testing.assert_array_equal(batch["anchor"], [0, 0, 0, 1, 0, 0, 0, 1])

    def logits(ids: np.ndarray) -> np.ndarray:
        found = jax.jit(lambda params: qwen3.head(model, params)(qwen3.apply(model, params, ids)))(state.params)
        return np.asarray(found, np.float64)[:, :-1]

    ours, theirs = logits(trained["input_ids"]), logits(held["input_ids"])
    kd, anchor = divergence(ours, trained, 2.0), divergence(theirs, held, 2.0)
    best = np.take_along_axis(ours, trained["topk_idx"][..., :1].astype(np.int64), axis=-1)[..., 0]
    top1 = float(np.sum(np.log(np.exp(ours).sum(axis=-1)) - best))
    assert float(sums["kd_loss"]) == pytest.approx(kd, rel=1e-4)
    assert float(sums["anchor_loss"]) == pytest.approx(anchor, rel=1e-4)
    assert float(sums["loss"]) == pytest.approx(kd + 0.3 * top1 + 0.5 * anchor, rel=1e-4)
    assert float(sums["weight"]) == 6 * 11  # tokens to train on; the anchors' are not among them
    logged = task.summarise({name: float(x) for name, x in sums.items()})
    assert logged["anchor_loss"] == pytest.approx(anchor / (2 * 11), rel=1e-4)
    assert logged["kd_loss"] == pytest.approx(kd / (6 * 11), rel=1e-4)


def gradients(experiment: Experiment, number: int) -> dict[str, np.ndarray]:
    state, task = experiment.init(), experiment.task
    varied = {name: np.float32(x) for name, x in task.varied.items()}
    prepared, wanted = task.prepare(state.params), differentiated(task, state.params)
    loss, arguments, _ = bind_loss(task, prepared, wanted, {}, task.open_feed(experiment.mesh)(number), varied)
    return flatten(jax.jit(jax.grad(loss, has_aux=True))(*arguments)[0])


@pytest.mark.slow
def test_without_weight_the_gradient_is_that_of_the_rows_to_train_on(folder: Path) -> None:
    kept, alone, heavy = (
        gradients(build(config), 3)
        for config in (
            make_config(folder, "task.anchor.weight=0.0"),
            make_config(folder, anchored=False),
            make_config(folder),
        )
    )
    assert any(np.abs(x).max() > 1e-3 for x in alone.values())
    for path, expected in alone.items():
        np.testing.assert_allclose(kept[path], expected, rtol=1e-4, atol=1e-6, err_msg=path)
    assert any(not np.allclose(heavy[path], expected, rtol=1e-2) for path, expected in alone.items())


def test_rows_do_not_depend_on_who_reads_them(folder: Path) -> None:
    experiment = build(make_config(folder, "batch_size=10"))
    anchors = experiment.task.open_feed(experiment.mesh)
    whole = anchors._read(5, 0, 10)  # type: ignore[attr-defined]
    assert set(whole) == set(experiment.task.abstract_feed(experiment.mesh))
    assert whole["anchor"].sum() == 2
    for cut in ((0, 1, 4, 10), (0, 3, 8, 10), tuple(range(11))):
        parts = [anchors._read(5, *span) for span in itertools.pairwise(cut)]  # type: ignore[attr-defined]
        for name, rows in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), rows, err_msg=name)
    # An epoch has every training block once, whatever anchors there are between them.
    count, seen = experiment.task.train_rows, []
    for number in range(count // 8):
        rows = anchors._read(number, 0, 10)  # type: ignore[attr-defined]
        seen += [row.tobytes() for row in rows["input_ids"][rows["anchor"] == 0]]
    known = rows_of(folder / "cache", blocks.shuffled(0, 0, count)[: len(seen)])["input_ids"]
    assert seen == [row.tobytes() for row in known]


@pytest.mark.slow
def test_anchors_of_the_student_itself_are_met_at_first_and_left_slowly(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, f"task.anchor.path={tmp_path / 'own'}", "task.anchor.weight=0.0")
    planned = build(config, planned=True)  # before there are any
    state = planned.init()
    student = LanguageModel("student", config.model, state.params, planned.mesh, planned.specs)
    moved = jax.tree_util.tree_map_with_path(lambda path, x: x + 1 if "lora" in str(path) else x, student.params)
    bare = language_model.without_adapters(student._replace(params=moved))  # whatever they are, they are left out
    assert bare.config.lora is None
    few = SETTINGS._replace(held_out=0.0, blocks=ANCHORS)
    caches.build(tmp_path / "own", [folder / "text.txt"], "bytes", bare, few, QUIET)
    ends, steps = [], Steps(build(config))
    for weight in (0.0, 100.0):
        varied = steps.settings.task | {"anchor_weight": steps.built.put(np.float32(weight))}
        steps.settings = steps.settings._replace(task=varied)
        state, found = steps.built.init(), []
        for _ in range(6):
            state, sums = steps(state)
            found.append(float(sums["anchor_loss"] / sums["anchor_tokens"]))
        assert abs(found[0]) < 1e-7
        assert found[-1] > 1e-5
        ends.append(found[-1])
    assert ends[1] < 0.7 * ends[0]  # the weight holds it back


@pytest.mark.slow
def test_one_device_is_eight_and_a_part_of_the_batch_is_a_part_of_the_sum(folder: Path) -> None:
    ends = []
    for overrides in ((), ("mesh.devices=8",), ("accumulation=4",)):
        steps = Steps(build(make_config(folder, "optimizer.learning_rate=0.005", *overrides)))
        state = steps.built.init()
        for _ in range(2):
            state, sums = steps(state)
        ends.append((float(sums["anchor_loss"]), float(sums["loss"]), flatten(state.params)))
    for anchor_loss, loss, params in ends[1:]:
        assert anchor_loss == pytest.approx(ends[0][0], rel=1e-3)
        assert loss == pytest.approx(ends[0][1], rel=1e-3)
        for path, leaf in params.items():
            np.testing.assert_allclose(leaf, ends[0][2][path], rtol=1e-2, atol=1e-4, err_msg=path)


@pytest.mark.slow
def test_resumed_to_the_bit(folder: Path, tmp_path: Path) -> None:
    ends = []
    for name, stops in (("straight", (4,)), ("resumed", (2, 4))):
        for steps in stops:
            train(make_config(folder, f"steps={steps}"), Run(tmp_path / name), QUIET)
        experiment = build(configs.load(tmp_path / name / "config.yaml", [], ExperimentConfig))
        checkpoints = open_checkpoints(Run(tmp_path / name), experiment, {}, read_only=True)
        ends.append(flatten(checkpoints.restore(4, experiment.abstract_state)))
    for path, leaf in ends[0].items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(ends[1][path]), err_msg=path)
    logged = [json.loads(line) for line in (tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["train/anchor_loss"] > 0 for row in logged if "train/loss" in row)
    # A run that was made without them, by importing weights, takes them as long as it has not been trained.
    later = Run(tmp_path / "later")
    create_run(later, make_config(folder, "batch_size=8", anchored=False), str(tmp_path / "straight"))
    train(make_config(folder, "steps=1"), later, QUIET)
    with pytest.raises(ConfigError, match=r"task\.anchor"):
        train(make_config(folder, "steps=2", "task.anchor.every=2"), later, QUIET)


def test_the_weight_is_an_argument_and_other_anchors_are_other_data(folder: Path) -> None:
    one, other = (build(make_config(folder, *more)) for more in ((), ("task.anchor.weight=0.9",)))
    feed = one.abstract_inputs[3]
    assert feed["anchor"].shape == (8,)
    texts = [built.train_step.lower(*built.abstract_inputs[:3], feed).as_text() for built in (one, other)]
    assert texts[0] == texts[1]
    assert one.task.fingerprint == other.task.fingerprint
    without = build(make_config(folder, anchored=False)).task.fingerprint
    assert set(one.task.fingerprint) - set(without) == {"anchors/train"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 10}, r"--length: 10 and 12"),
        ({"vocab_size": 300}, r"vocabulary: 300 and 257"),
        ({"teacher": {"topk": 4}}, r"--topk: 4 and 5"),
        ({"teacher": {"temperatures": [2.0, 1.0]}}, r"--temperature: \[2.0, 1.0\] and \[1.0, 2.0\]"),
        ({"teacher": None}, r"other has no teacher's logits"),
    ],
)
def test_anchors_of_another_shape_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    manifest = blocks.read_manifest(folder / "anchors").model_dump()
    (tmp_path / "other").mkdir()
    blocks.write_manifest(tmp_path / "other", blocks.Manifest(**configs.merge(manifest, changes)))
    with pytest.raises(ConfigError, match=message) as caught:
        build(make_config(folder, f"task.anchor.path={tmp_path / 'other'}"))
    assert str(tmp_path / "other") in str(caught.value)
    assert str(folder / "cache") in str(caught.value) or changes == {"teacher": None}


def test_what_cannot_be_anchors_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task.anchor.path: no blocks at .*--without-adapters"):
        build(make_config(folder, f"task.anchor.path={tmp_path / 'none'}"))
    with pytest.raises(ConfigError, match="a batch has only 2 rows"):
        build(make_config(folder, "batch_size=2"))
