"""What runs a study file asks for."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures import CONFIGS
from tinypod.errors import ConfigError
from tinypod.study.file import load_study, split_lists, study_of
from tinypod.study.packing import MOST_LANES, can_pack, pack, shape_of

SHIPPED = sorted(CONFIGS.glob("studies/*.yaml"))


def write(folder: Path, **tree: Any) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"base": "demo"} | tree, sort_keys=False))
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_study_is_short_and_expands(path: Path) -> None:
    assert len([line for line in path.read_text().splitlines() if not line.startswith("#")]) < 20
    study = load_study(f"studies/{path.stem}")
    assert len(study.runs) >= 6
    assert len({shape_of(run.config) for run in study.runs}) <= len({run.variant for run in study.runs})


def test_names_of_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without `studies/`; `demo` is a config, too, and `base` is one only."""
    monkeypatch.chdir(tmp_path)
    assert load_study("width").runs == load_study("studies/width").runs
    assert len(load_study("demo").runs) == 12
    with pytest.raises(ConfigError, match=r"trm/sudoku_mlp is the config of one run, not a study: `tinypod train"):
        load_study("trm/sudoku_mlp")
    with pytest.raises(ConfigError, match="did you mean the recipe `studies/width`"):
        load_study("studies/widht")


def test_a_grid_zipped_lists_variants_and_seeds_multiply(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        set={"steps": 7, "eval.every_steps": None},
        factors={"model.hidden_size": [32, 64]},
        zip={"batch_size": [8, 16, 32], "optimizer.learning_rate": [0.1, 0.2, 0.3]},
        variants={"plain": {}, "no EMA": {"ema_decay": None, "eval.weights": "live"}},
        seeds=[5, 7],
    )
    study = load_study(path)
    assert len(study.runs) == 2 * 3 * 2 * 2
    one = next(run for run in study.runs if run.name == "no_EMA,batch_size=16,learning_rate=0.2,hidden_size=64,seed=7")
    config = one.config
    assert (config.batch_size, config.optimizer.learning_rate, config.model.hidden_size) == (16, 0.2, 64)
    assert (config.steps, config.eval.every_steps, config.ema_decay, config.seed) == (7, None, None, 7)
    assert one.variant == "no EMA,batch_size=16,learning_rate=0.2,hidden_size=64"
    assert one.levels == {"batch_size": 16, "optimizer.learning_rate": 0.2, "model.hidden_size": 64}
    assert {run.config.ema_decay for run in study.runs if run.variant.startswith("plain")} == {0.995}


def test_overrides_go_into_every_run_below_the_factors(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, factors={"steps": [3, 4]}), ["steps=9", "batch_size=4"])
    assert [(run.config.steps, run.config.batch_size) for run in study.runs] == [(3, 4), (4, 4)]


def test_several_values_on_the_command_line_make_a_study() -> None:
    lists, rest = split_lists(["seed=0,1,2", "optimizer.learning_rate=1e-4,3e-4", "steps=5", "mesh={data: 1, fsdp: 1}"])
    assert lists == {"seed": [0, 1, 2], "optimizer.learning_rate": [1e-4, 3e-4]}
    assert rest == ["steps=5", "mesh={data: 1, fsdp: 1}"]
    study = study_of("demo", lists, rest)
    assert [run.name for run in study.runs][:2] == ["learning_rate=0.0001,seed=0", "learning_rate=0.0001,seed=1"]
    assert len(study.runs) == 6


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"factor": {}}, "factor: unknown key; did you mean `factors`?"),
        ({"zip": {"steps": [1], "batch_size": [1, 2]}}, "equally long"),
        ({"factors": {"steps": [1]}, "zip": {"steps": [1]}}, "either a factor or zipped"),
        ({"factors": {"seed": [1]}}, "`seeds`"),
        ({"seeds": [1, 1]}, "twice"),
        (
            {"factors": {"model.hiden_size": [32]}},
            r"run hiden_size=32,seed=0:\s+model.hiden_size: unknown key; did you",
        ),
        ({"factors": {"steps": []}}, "factors.steps"),
        ({"variants": {"a b": {}, "a_b": {}}}, "same name"),
        ({"stop": {"at_target": True}}, "needs a target"),
        ({"search": {"kind": "random", "trials": 2, "space": {"steps": {"low": 2, "high": 1}}}}, "must be below"),
        ({"search": {"kind": "halving", "trials": 2, "space": {"steps": [1]}}}, "rung_steps"),
        (
            {"search": {"kind": "halving", "trials": 2, "space": {"seed": [1]}, "rung_steps": [150]}},
            "no evaluation before the end",
        ),
        ({"base": "dem"}, "did you mean the recipe `demo`?"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_study(write(tmp_path, **tree))


def test_runs_of_one_shape_differ_in_settings_alone(tmp_path: Path) -> None:
    def shapes(key: str, *values: Any) -> int:
        return len({shape_of(run.config) for run in load_study(write(tmp_path, factors={key: list(values)})).runs})

    together = {
        "optimizer.learning_rate": (0.1, 0.2),
        "optimizer.weight_decay": (0.0, 0.2),
        "optimizer.beta1": (0.8, 0.9),
        "optimizer.schedule.warmup_steps": (1, 2),
        "optimizer.batch_scaling": ({"kind": "none"}, {"kind": "linear", "base_batch": 64}),
        "ema_decay": (0.9, 0.99),
        "task.halting.exploration": (0.0, 0.5),
        "task.q_loss_weight": (0.0, 0.5),
    }
    for key, values in together.items():
        assert shapes(key, *values) == 1, key
    apart = {
        "steps": (3, 4),
        "batch_size": (8, 16),
        "model.hidden_size": (32, 64),
        "optimizer.clip_norm": (None, 1.0),
        "task.halting.max_steps": (2, 3),
        "data.train_rows": (100, 200),
    }
    for key, values in apart.items():
        assert shapes(key, *values) == 2, key


def test_packs_are_even_and_no_larger_than_asked() -> None:
    assert pack(["a", "b", "a", "a"], 1) == [[0, 2, 3], [1]]
    assert [len(group) for group in pack(["a"] * 10, 1, most=4)] == [4, 4, 2]
    assert [len(group) for group in pack(["a"] * 9, 1, most=4)] == [3, 3, 3]
    assert [len(group) for group in pack(["a"] * (MOST_LANES + 2), 1)] == [MOST_LANES // 2 + 1] * 2


def test_what_asks_for_devices_of_its_own_is_trained_alone(tmp_path: Path) -> None:
    [plain] = load_study(write(tmp_path)).runs
    [split] = load_study(write(tmp_path, set={"mesh.fsdp": 2})).runs
    [text] = load_study(write(tmp_path, base="distill/tiny")).runs
    assert [can_pack(run.config) for run in (plain, split, text)] == [True, False, False]


def test_a_search_draws_the_same_trials_each_time(tmp_path: Path) -> None:
    space = {
        "optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "scale": "log"},
        "optimizer.beta1": {"low": 0.8, "high": 0.95},
        "model.hidden_size": [32, 64],
    }
    path = write(tmp_path, search={"kind": "random", "trials": 12, "space": space}, seeds=2)
    study = load_study(path)
    assert study == load_study(path)
    assert [run.name for run in study.runs[:3]] == ["trial00,seed=0", "trial00,seed=1", "trial01,seed=0"]
    configs = [run.config for run in study.runs[::2]]
    assert len({config.optimizer.learning_rate for config in configs}) == 12
    assert all(1e-4 <= config.optimizer.learning_rate <= 1e-2 for config in configs)
    assert sum(config.optimizer.learning_rate < 1e-3 for config in configs) >= 2  # not drawn on a linear scale
    assert all(0.8 <= config.optimizer.beta1 <= 0.95 for config in configs)
    assert {config.model.hidden_size for config in configs} == {32, 64}
    assert study.runs[0].levels.keys() == space.keys()
