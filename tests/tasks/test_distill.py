"""Distillation by the same loop: a tiny teacher, its cache, and students in every form."""

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from tinypod import config as configs
from tinypod.cache import build as caches
from tinypod.data import blocks
from tinypod.errors import ConfigError, DataError, UserError
from tinypod.evaluate import Evaluator
from tinypod.experiment import ExperimentConfig, build
from tinypod.models import qwen3
from tinypod.runs.checksums import flatten
from tinypod.runs.folder import Run
from tinypod.runs.load import load_weights
from tinypod.runs.saver import open_checkpoints
from tinypod.step import select_trained
from tinypod.training import train
from tinypod.weights import hugging_face, language_model
from tinypod.weights.convert import convert
from tinypod.weights.exporting import write_weights
from tinypod.weights.importing import create_run

QUIET = Console(file=StringIO())
TEXT = " ".join(
    f"{word} is {word[::-1]}." for word in ("level", "pod", "tiny", "cache", "teacher", "student", "bit") * 60
)
MODEL = {
    "kind": "qwen3",
    "vocab_size": 264,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 32,
    "dtype": "float32",
}


def make_config(path: Path, *overrides: str, **model: Any) -> ExperimentConfig:
    tree: dict[str, Any] = {
        "steps": 4,
        "batch_size": 8,
        "mesh": {"devices": 1},
        "ema_decay": None,
        "data": {"kind": "blocks", "path": str(path)},
        "model": MODEL | model,
        "task": {"kind": "distill", "stretch": 8},
        "optimizer": {"kind": "adamw", "learning_rate": 0.01},
        "eval": {"weights": "live", "batch_size": 8, "every_steps": None},
        "checkpoint": {"every_steps": 2, "every_minutes": None},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    for text in overrides:
        tree = configs.merge(tree, configs.parse_override(text))
    return configs.validate(json.loads(json.dumps(tree)), ExperimentConfig, "test")


LABELS = ("task.kd_weight=0.0", "task.label_weight=1.0")
SETTINGS = caches.Settings(length=16, topk=6, held_out=0.2, shard_blocks=50, batch_size=8, stretch=5)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on text alone."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "text.txt").write_text(TEXT)
    caches.build(folder / "blocks", [folder / "text.txt"], "bytes", None, SETTINGS, QUIET)
    train(make_config(folder / "blocks", *LABELS, "steps=60", "checkpoint.every_steps=60"), Run(folder / "run"), QUIET)
    return folder


@pytest.fixture(scope="module")
def cache(teacher: Path) -> Path:
    model = language_model.load(str(teacher / "run"))
    caches.build(teacher / "cache", [teacher / "text.txt"], "bytes", model, SETTINGS, QUIET)
    return teacher / "cache"


def scores(run: Path, *overrides: str, split: str | None = None) -> dict[str, float]:
    loaded = load_weights(Run(run), list(overrides), "latest")
    experiment = loaded.experiment
    evaluation = experiment.task.open_evaluation(split)
    return Evaluator(evaluation, experiment.mesh, experiment.specs, 8)(loaded.params)


def state_of(run: Path, step: int) -> Any:
    experiment = build(configs.load(run / "config.yaml", [], ExperimentConfig))
    return open_checkpoints(Run(run), experiment, {}, read_only=True).restore(step, experiment.abstract_state)


def test_a_copied_run_is_a_language_model_without_its_blocks(teacher: Path, tmp_path: Path) -> None:
    run = shutil.copytree(teacher / "run", tmp_path / "copied")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(teacher / "blocks"), "/not/here"))
    here, there = (language_model.load(str(source)) for source in (run, teacher / "run"))
    for a, b in zip(jax.tree.leaves(here.params), jax.tree.leaves(there.params), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(DataError, match="/not/here"):
        scores(run)


def test_a_model_learns_a_text_and_its_cache_says_what_it_thinks(teacher: Path, cache: Path) -> None:
    assert scores(teacher / "run")["perplexity"] < 30  # 257 tokens; a uniform guess has that many
    manifest = blocks.read_manifest(cache)
    held_out = blocks.Blocks(cache, manifest, "held_out")
    some = held_out.read([1, 0, 3])
    model = language_model.load(str(teacher / "run"))
    logits = np.asarray(
        qwen3.head(model.config, model.params)(qwen3.apply(model.config, model.params, some["input_ids"])), np.float64
    )[:, :-1]
    logits -= logits.max(axis=-1, keepdims=True)
    expected = -np.sort(-logits, axis=-1)[..., :6]
    np.testing.assert_allclose(some["topk_logits"].astype(np.float64), expected, rtol=1e-3, atol=1e-5)
    assert (some["topk_logits"][..., 0] == 0).all()
    np.testing.assert_array_equal(some["topk_idx"][..., 0], logits.argmax(axis=-1))
    for at, temperature in enumerate((1.0, 2.0)):
        np.testing.assert_allclose(
            some["logz"][..., at], np.log(np.exp(logits / temperature).sum(axis=-1)), rtol=1e-5, atol=1e-5
        )


def test_a_build_that_was_cut_off_continues_and_ends_the_same(teacher: Path, cache: Path, tmp_path: Path) -> None:
    model = language_model.load(str(teacher / "run"))
    asked: list[int] = []

    class Enough(Exception):
        pass

    def limited(folder: Path, limit: int) -> blocks.Manifest:
        real = caches.make_asker

        def counting(*arguments: Any) -> Any:
            ask = real(*arguments)

            def counted(ids: np.ndarray) -> Any:
                asked.append(len(ids))
                if len(asked) > limit:
                    raise Enough
                return ask(ids)

            return counted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(caches, "make_asker", counting)
            return caches.build(folder, [teacher / "text.txt"], "bytes", model, SETTINGS, QUIET)

    with pytest.raises(Enough):
        limited(tmp_path / "c", 10)
    assert not (tmp_path / "c" / blocks.MANIFEST).exists()
    first = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert first
    manifest = limited(tmp_path / "c", 10**6)
    assert manifest == blocks.read_manifest(cache)
    assert blocks.verify(tmp_path / "c", manifest) == []
    other = SETTINGS._replace(length=8)
    with pytest.raises(UserError, match="already holds a cache"):
        caches.build(tmp_path / "c", [teacher / "text.txt"], "bytes", model, other, QUIET)
    (tmp_path / "c" / blocks.MANIFEST).unlink()
    with pytest.raises(UserError, match="holds the beginning of another cache"):
        caches.build(tmp_path / "c", [teacher / "text.txt"], "bytes", model, other, QUIET)


STEPS = ("steps=12", "checkpoint.every_steps=12", "optimizer.learning_rate=0.002")
FORMS: dict[str, dict[str, Any]] = {
    "low-bit": {"low_bit": {"mlp_bits": 2, "mlp_rank": 2, "attention_bits": 2, "attention_rank": 2, "fit_rounds": 0}},
    "LoRA over low-bit": {"low_bit": "q4a4", "lora": {"rank": 2}},
    "LoRA over plain bfloat16": {"lora": {"rank": 2}, "weight_dtype": "bfloat16"},
    "all of it": {},
}


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form == "low-bit" else pytest.mark.slow) for form in FORMS]
)
def test_a_student_comes_nearer_and_nothing_moves_but_what_should(
    teacher: Path, cache: Path, tmp_path: Path, form: str
) -> None:
    config = make_config(cache, *STEPS, **FORMS[form])
    create_run(Run(tmp_path / "run"), config, str(teacher / "run"))
    before, start = scores(tmp_path / "run"), flatten(state_of(tmp_path / "run", 0).params)
    train(config, Run(tmp_path / "run"), QUIET)
    after, end = scores(tmp_path / "run"), flatten(state_of(tmp_path / "run", 12).params)
    assert after["kd_loss"] < before["kd_loss"] or before["kd_loss"] < 1e-4
    moved = {path.rpartition(".")[2] for path in start if not np.array_equal(start[path], end[path])}
    expected = {
        "low-bit": {"A", "B", "g"},
        "LoRA over low-bit": {"lora_A", "lora_B"},
        "LoRA over plain bfloat16": {"lora_A", "lora_B"},
    }
    if form in expected:
        assert moved == expected[form]
    else:
        assert {"weight", "embed", "q_norm"} <= moved


@pytest.mark.slow
def test_stages_are_arguments_of_one_program(teacher: Path, cache: Path, tmp_path: Path) -> None:
    run, form = tmp_path / "run", FORMS["low-bit"]
    create_run(Run(run), make_config(cache, **form), str(teacher / "run"))
    train(make_config(cache, "steps=2", "task.train.mlp=0.0", **form), Run(run), QUIET)
    first, second = (flatten(state_of(run, step).params) for step in (0, 2))
    still = {path for path in first if np.array_equal(first[path], second[path])}
    assert all(f"layers.mlp.{name}.{part}" in still for name in ("gate", "up", "down") for part in "ABg")
    assert "layers.attention.q.A" not in still
    train(make_config(cache, "steps=4", "task.train.factors=0.0", **form), Run(run), QUIET)  # a later stage
    third = flatten(state_of(run, 4).params)
    assert np.array_equal(second["layers.mlp.up.A"], third["layers.mlp.up.A"])
    assert not np.array_equal(second["layers.mlp.up.g"], third["layers.mlp.up.g"])
    experiment = build(make_config(cache, **form))
    other = build(make_config(cache, "task.train.mlp=0.0", "task.kd_weight=0.5", **form))
    feed = experiment.abstract_inputs[3]
    assert (
        experiment.train_step.lower(*experiment.abstract_inputs[:3], feed).as_text()
        == other.train_step.lower(*other.abstract_inputs[:3], feed).as_text()
    )


@pytest.mark.slow
def test_resumed_to_the_bit_and_the_same_on_any_mesh(teacher: Path, cache: Path, tmp_path: Path) -> None:
    form = FORMS["LoRA over low-bit"]
    for name, stops in (("straight", (4,)), ("resumed", (2, 4))):
        create_run(Run(tmp_path / name), make_config(cache, **form), str(teacher / "run"))
        for steps in stops:
            train(make_config(cache, f"steps={steps}", **form), Run(tmp_path / name), QUIET)
    first, second = (flatten(state_of(tmp_path / name, 4)) for name in ("straight", "resumed"))
    for path, leaf in first.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(second[path]), err_msg=path)
    straight = flatten(state_of(tmp_path / "straight", 4).params)
    for mesh in ("{devices: 8}", "{devices: 8, data: 2, fsdp: 2, tensor: 2}"):
        run = tmp_path / mesh.replace(" ", "")
        config = make_config(cache, f"mesh={mesh}", **form)
        create_run(Run(run), config, str(teacher / "run"))
        train(config, Run(run), QUIET)
        for path, leaf in flatten(state_of(run, 4).params).items():
            expected, found = np.asarray(straight[path], np.float32), np.asarray(leaf, np.float32)
            np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-4, err_msg=f"{mesh} {path}")


@pytest.mark.slow
def test_straight_through_weights_move_their_indices_and_are_resumed_to_the_bit(
    teacher: Path, cache: Path, tmp_path: Path
) -> None:
    form = FORMS["low-bit"] | {"straight_through": True}
    for name, stops in (("straight", (4,)), ("resumed", (2, 4))):
        create_run(Run(tmp_path / name), make_config(cache, **form), str(teacher / "run"))
        before = state_of(tmp_path / name, 0).params
        for steps in stops:
            train(make_config(cache, f"steps={steps}", **form), Run(tmp_path / name), QUIET)
    first, second = (flatten(state_of(tmp_path / name, 4)) for name in ("straight", "resumed"))
    for path, leaf in first.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(second[path]), err_msg=path)
    after = state_of(tmp_path / "straight", 4).params
    flat = flatten(before), flatten(after)
    moved = {path.rpartition(".")[2] for path in flat[0] if not np.array_equal(flat[0][path], flat[1][path])}
    assert moved == {"A", "B", "g", "latent"}
    frozen = make_config(cache, **FORMS["low-bit"]).model
    trained = make_config(cache, **form).model
    indices = [convert(trained, params, frozen).params["layers"]["mlp"]["up"]["index"] for params in (before, after)]
    assert not np.array_equal(*indices)
    # What was trained is what is evaluated, exported and frozen.
    create_run(Run(tmp_path / "frozen"), make_config(cache, **FORMS["low-bit"]), str(tmp_path / "straight"))
    assert scores(tmp_path / "frozen") == scores(tmp_path / "straight")
    write_weights(tmp_path / "out", trained, after, "float32")
    create_run(Run(tmp_path / "plain"), make_config(cache), str(tmp_path / "out"))
    assert scores(tmp_path / "plain") == pytest.approx(scores(tmp_path / "straight"), rel=1e-5)


def test_the_perplexity_of_a_text_is_that_of_overlapping_windows(teacher: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:150])
    found = scores(teacher / "run", f"data.text={text}", "data.window=32", "data.stride=16", split="text")
    model, ids = (
        language_model.load(str(teacher / "run")),
        np.frombuffer(TEXT[:150].encode(), np.uint8).astype(np.int32),
    )
    total = 0.0
    for end in range(16, 150 + 16, 16):
        end = min(end, 150)
        first, new = max(0, end - 32), max(end - 16, 1) if end % 16 == 0 else end // 16 * 16
        window = ids[first:end]
        logits = qwen3.head(model.config, model.params)(qwen3.apply(model.config, model.params, window[None]))
        log_p = np.asarray(jax.nn.log_softmax(logits))[0, :-1]
        losses = -log_p[np.arange(len(window) - 1), window[1:]]
        total += losses[new - first - 1 :].sum()
    assert found["perplexity"] == pytest.approx(np.exp(total / 149), rel=1e-4)


@pytest.mark.slow
def test_an_export_has_the_effective_weights(teacher: Path, cache: Path, tmp_path: Path) -> None:
    config = make_config(cache, **FORMS["LoRA over low-bit"])
    create_run(Run(tmp_path / "run"), config, str(teacher / "run"))
    train(config, Run(tmp_path / "run"), QUIET)
    loaded = load_weights(Run(tmp_path / "run"), [], "latest")
    write_weights(tmp_path / "out", config.model, loaded.params, "float32")
    again = language_model.load(str(tmp_path / "out"), "dtype=float32")
    assert hugging_face.read_model_config(tmp_path / "out", dtype="float32") == again.config
    tokens = np.arange(24).reshape(2, 12)
    prepared = qwen3.prepare(config.model, loaded.params)
    ours = qwen3.head(config.model, prepared)(qwen3.apply(config.model, prepared, tokens))
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(np.asarray(ours), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["low-bit", "LoRA over low-bit"])
def test_a_short_dtype_has_nearly_the_same_gradients_and_adds_them_up_in_float32(cache: Path, form: str) -> None:
    def first_step(dtype: str, accumulation: int) -> dict[str, Any]:
        options = (f"accumulation={accumulation}", "task.temperature=2.0", "task.label_weight=0.5")
        experiment = build(make_config(cache, *options, **FORMS[form], dtype=dtype, head_dim=16))
        state, settings, feed = experiment.init(), experiment.put_settings(), experiment.task.open_feed(experiment.mesh)
        with jax.numpy_dtype_promotion("standard"):  # attention of jax.nn in bfloat16 is not strict
            state, sums = experiment.train_step(state, settings, experiment.put(np.int32(0)), feed(0))
        feed.close()
        moved = jax.tree.leaves((select_trained(experiment.task, state.params), state.opt_state))
        assert {leaf.dtype.name for leaf in moved if leaf.ndim} == {"float32"}
        return {name: float(x) for name, x in sums.items()}

    exact, short, in_parts = first_step("float32", 1), first_step("bfloat16", 1), first_step("bfloat16", 4)
    for name in ("loss", "grad_norm"):
        assert short[name] == pytest.approx(exact[name], rel=0.03), name
        assert in_parts[name] == pytest.approx(short[name], rel=0.01), name


PIPELINES = {
    "{devices: 8, data: 2, pipeline: 2, fsdp: 2}": {"low_bit": "q4a4"},
    "{devices: 8, data: 1, pipeline: 2, fsdp: 2, tensor: 2}": {"remat": True},
    "{devices: 4, data: 1, pipeline: 4}": {"low_bit": "q4a4", "lora": {"rank": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", PIPELINES)
def test_a_pipeline_computes_what_one_device_does(cache: Path, mesh: str) -> None:
    """Losses, weights after three steps, and held-out scores; layers lie on the devices of their stage alone."""
    found = []
    for where in ("{devices: 1}", mesh):
        options = (f"mesh={where}", "batch_size=16", "accumulation=4", "optimizer.learning_rate=0.001")
        experiment = build(make_config(cache, *options, num_layers=4, **PIPELINES[mesh]))
        state, settings, feed = experiment.init(), experiment.put_settings(), experiment.task.open_feed(experiment.mesh)
        losses = []
        for number in range(3):
            state, sums = experiment.train_step(state, settings, experiment.put(np.int32(number)), feed(number))
            losses.append(float(sums["loss"] / sums["weight"]))
        feed.close()
        evaluation = experiment.task.open_evaluation(None)
        scored = Evaluator(evaluation, experiment.mesh, experiment.specs, 8)(state.params)
        found.append((losses, scored, jax.device_get(flatten(state.params))))
    (losses, scored, expected), (their_losses, their_scores, params) = found
    assert losses == pytest.approx(their_losses, rel=1e-5)
    assert scored == pytest.approx(their_scores, rel=1e-4)
    for path, leaf in params.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-3, atol=2e-5, err_msg=path)
    stages = experiment.mesh.shape["pipeline"]
    norm = state.params["layers"]["mlp_norm"]
    assert norm.sharding.shard_shape(norm.shape) == (4 // stages, 16)


def test_a_low_bit_model_is_described_with_its_bits(cache: Path) -> None:
    task = build(make_config(cache, **FORMS["low-bit"])).task
    # A matrix of 16 × 16: 2 bits and 2 · 33 scales; the three of 16 × 32: 2 · 49.
    expected = 2 + 16 * (4 * 2 * 33 + 3 * 2 * 49) / (4 * 256 + 3 * 512)
    assert f"low-bit ({expected:.2f} bits per weight of its linear layers)" in task.description


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("mesh={devices: 4, pipeline: 2}", "accumulation=1"),
            r"accumulation=1: the parts of a batch pass the 2 stages",
        ),
        (
            ("mesh={devices: 3, pipeline: 3}", "accumulation=3", "batch_size=9"),
            r"mesh.pipeline=3 does not divide dimension 0",
        ),
        (("task.temperature=1.5",), "has the normalisers of 1, 2"),
        (("task.kd_weight=0.0",), "every weight of the loss is 0"),
        (("model.vocab_size=100",), "go up to 257"),
        (("model.weight_dtype=bfloat16",), "is for frozen weights"),
        (("data.path=nowhere",), "tinypod cache build"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(cache: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, UserError), match=message):
        build(make_config(cache, *overrides))
