from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, PositiveInt

from fixtures import CONFIGS, TINY
from tinypod import config as configs
from tinypod.errors import ConfigError
from tinypod.experiment import ExperimentConfig

BASE = CONFIGS / "trm" / "sudoku_mlp.yaml"


def load(*overrides: str) -> ExperimentConfig:
    return configs.load(BASE, overrides, ExperimentConfig)


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "optimizer.learning_rat=1e-3",
            ["optimizer.learning_rat: unknown key", "mean `optimizer.learning_rate=0.001`?"],
        ),
        ("model.mixing.num_head=4", ["model.mixing.num_head: unknown key"]),
        ("batchsize=3", ["batchsize: unknown key", "mean `batch_size=3`?"]),
        ("lr=1e-3", ["lr: unknown key; did you mean `optimizer.learning_rate=0.001`?"]),
        ("optimizer.lr=1e-3", ["optimizer.lr: unknown key; did you mean `optimizer.learning_rate=0.001`?"]),
        ("weight_decay=1", ["did you mean `optimizer.weight_decay=1`?"]),  # not ema_decay, which is spelled like it
        ("every_steps=5", ["`eval.every_steps=5` or `checkpoint.every_steps=5` or `log.every_steps=5`"]),
        ("optimizer.schedul.warmup_steps=1", ["optimizer.schedul: unknown key; did you mean `optimizer.schedule`?"]),
        ("rank=4", ["rank: unknown key; known keys here"]),  # model.lora.rank is another kind of model's
        ("nothing.like.it=3", ["nothing: unknown key", "known keys here"]),
        ("steps=many", ["steps: expected a valid integer, got 'many'"]),
        ("steps=1.5", ["steps: expected a valid integer"]),
        ("steps=1.5e0", ["steps: expected a valid integer, got 1.5"]),
        ("steps=1e400", ["steps: expected a valid integer, got inf"]),
        ("steps=true", ["steps: expected a valid integer"]),
        ("steps='10'", ["steps: expected a valid integer"]),
        ("steps=0", ["steps: expected greater than 0, got 0"]),
        ("optimizer.learning_rate=-1e-4", ["optimizer.learning_rate: expected greater than or equal to 0"]),
        ("optimizer.learning_rate=.nan", ["optimizer.learning_rate: expected a finite number"]),
        ("optimizer.beta2=1.0", ["optimizer.beta2: expected less than 1"]),
        ("accumulation=5", ["batch_size=768 does not divide into accumulation=5 parts"]),
        ("model.mixing={kind: attention, num_heads: 7}", ["model: mixing.num_heads=7 does not divide hidden_size=512"]),
        ("model.mixing.kind=conv", ["model.mixing: no kind 'conv'", "'mlp', 'attention'"]),
        ("model.mixing={kind: mlp, positions: {kind: rope}}", ["model.mixing.positions: no kind 'rope'"]),
        ("model.kind=transformer", ["model: no kind 'transformer'; expected one of 'trm', 'qwen3'"]),
        ("model.kind=qwen3", ["task.kind=puzzle goes with model.kind=trm, not qwen3"]),
        ("model.dtype=bf16", ["got 'bf16'; did you mean `bfloat16`?"]),
        ("model.dtype=fp32", ["got 'fp32'; did you mean `float32`?"]),
        ("eval.weights=emma", ["got 'emma'; did you mean `ema`?"]),
        ("model.dtype=int8", ["model.dtype: expected 'float32', 'bfloat16' or 'float16', got 'int8'"]),
        ("ema_decay=null", ["eval.weights=ema needs ema_decay"]),
        ("data.path=null", ["data.path: expected a valid string"]),
        ("model.puzzle_embedding.width=100000", ["puzzle_embedding.width=100000 does not fit"]),
    ],
)
def test_a_bad_value_is_named_with_its_path(override: str, parts: list[str]) -> None:
    message = error_of(override)
    for part in [str(BASE), *parts]:
        assert part in message
    assert "pydantic" not in message
    assert len(message.splitlines()) == 2, message


@pytest.mark.parametrize("depth", [90, 5000])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ("{a: ", "}")])
def test_a_tree_without_end_is_refused(tmp_path: Path, begin: str, end: str, depth: int) -> None:
    value = begin * depth + "1" + end * depth
    (tmp_path / "deep.yaml").write_text(f"steps: {value}\n")
    with pytest.raises(ConfigError, match=r"deep\.yaml: nested too deeply"):
        configs.load(tmp_path / "deep.yaml", [], ExperimentConfig)
    assert "nested too deeply" in error_of(f"steps={value}")


def test_every_mistake_is_told_at_once() -> None:
    message = error_of("steps=0", "model.hidden_siz=3")
    assert "steps: expected greater than 0" in message
    assert "`model.hidden_size=3`" in message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"defaults: [{CONFIGS / 'base.yaml'}]\nsteps: 3\n")
    with pytest.raises(ConfigError, match=r"data\.path: missing; give it a value in the file or as data\.path=\.\.\."):
        configs.load(path, [], ExperimentConfig)
    with pytest.raises(ConfigError, match=r"data\.path: missing"):
        configs.load(path, ["data.train_split=train"], ExperimentConfig)


@pytest.mark.parametrize("text", ["steps", "=3", "a b=3", "3.a=1", "a..b=1"])
def test_an_override_of_the_wrong_form_is_refused(text: str) -> None:
    assert repr(text) in error_of(text)


def test_scientific_notation_is_a_number() -> None:
    assert load("optimizer.learning_rate=1e-4").optimizer.learning_rate == 1e-4
    assert load("optimizer.learning_rate=3E5").optimizer.learning_rate == 3e5
    loaded = load("steps=1e3", "eval.every_steps=2.5e2", "ema_decay=5e-1", "batch_size=768.0")
    assert (loaded.steps, loaded.eval.every_steps, loaded.ema_decay, loaded.batch_size) == (1000, 250, 0.5, 768)
    assert isinstance(loaded.steps, int)
    assert isinstance(loaded.eval.every_steps, int)


def test_a_warm_up_longer_than_the_run_is_doubted() -> None:
    assert load("steps=2000", "optimizer.schedule.warmup_steps=2000").doubts == []
    (doubt,) = load("steps=20", "optimizer.schedule.warmup_steps=50").doubts
    assert "optimizer.schedule.warmup_steps=50 is longer than the run (steps=20)" in doubt
    assert "40%" in doubt


def test_a_change_of_kind_leaves_nothing_of_the_old_kind() -> None:
    switched = load("model.mixing={kind: attention, num_heads: 4}", "model.mixing.kind=mlp")
    assert switched.model.mixing.kind == "mlp"
    kept = load("model.mixing={kind: attention, num_heads: 4}", "model.mixing.positions={kind: none}")
    assert (kept.model.mixing.kind, kept.model.mixing.num_heads) == ("attention", 4)


def test_defaults_merge_left_to_right_and_the_file_wins(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yaml").write_text("x: {one: 1, two: 1, three: 1}\nlist: [1, 2]\n")
    (tmp_path / "b.yaml").write_text("defaults: [sub/a.yaml]\nx: {two: 2, three: 2}\n")
    (tmp_path / "c.yaml").write_text("x: {four: 4}\n")
    (tmp_path / "d.yaml").write_text("defaults: [b.yaml, c.yaml]\nx: {three: 3}\nlist: [9]\n")
    assert configs.read_tree(tmp_path / "d.yaml") == {"x": {"one": 1, "two": 2, "three": 3, "four": 4}, "list": [9]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [loop.yaml]\n", "goes round in a circle"),
        ("defaults: [gone.yaml]\n", "no config file at .*gone.yaml .named in `defaults` of .*loop.yaml"),
        ("defaults: 3\n", "must be a list of file names"),
        ("steps: [\n", "not readable as YAML"),
        ("steps: 1\nsteps: 2\n", "not readable as YAML.*duplicate key"),
        ("- 1\n", "expected a mapping"),
        ("", "missing"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "loop.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        configs.load(path, [], ExperimentConfig)
    assert str(path) in str(caught.value)


def test_the_resolved_config_loads_again_unchanged(tmp_path: Path) -> None:
    config = load(*TINY, "log.wandb={project: p, mode: offline}", "model.mixing={kind: attention, num_heads: 2}")
    path = tmp_path / "config.yaml"
    path.write_text(configs.dump(config))
    assert configs.load(path, [], ExperimentConfig) == config


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().steps = 3  # type: ignore[misc]


class Leaf(configs.Config):
    kind: Literal["leaf"] = "leaf"
    size: PositiveInt = 1


class Node(configs.Config):
    kind: Literal["node"] = "node"
    rate: float = 0.5
    child: Annotated["Leaf | Node", Field(discriminator="kind")] = Leaf()


trees = st.recursive(
    st.builds(Leaf, size=st.integers(1, 9)),
    lambda child: st.builds(Node, rate=st.floats(0, 1e300), child=child),
    max_leaves=5,
)


@given(st.builds(Node, rate=st.floats(-1e-300, 1e300), child=trees))
def test_any_config_survives_yaml(tmp_path_factory: pytest.TempPathFactory, node: Node) -> None:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(configs.dump(node))
    assert configs.load(path, [], Node) == node


def test_differences_name_the_leaves() -> None:
    old, new = {"a": {"b": 1, "c": 2}, "d": None}, {"a": {"b": 1, "c": 3}, "d": {"e": 1}}
    assert configs.differences(old, new) == ["a.c: 2 -> 3", "d: None -> {'e': 1}"]
