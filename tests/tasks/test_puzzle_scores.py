from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fixtures import info_4x4, read_split, split_4x4, tiny_config
from tinypod import experiment
from tinypod.data import puzzles
from tinypod.evaluate import Evaluator
from tinypod.models import trm
from tinypod.solve.refine import make_program, refine
from tinypod.tasks import puzzle_scores
from tinypod.tasks.puzzle_thinking import TABLE, ThinkingConfig, make_think


def build(folder: Path, rows: int, num_sources: int, devices: int) -> experiment.Experiment:
    splits = {"train": split_4x4(4, 1), "test": split_4x4(rows, 2, num_sources)}
    puzzles.write_dataset(folder, info_4x4(num_sources), splits)
    return experiment.build(tiny_config(folder), jax.devices()[:devices])


def knowing(built: experiment.Experiment) -> trm.Params:
    """Random weights, with a Q head that has an opinion: rows differ in their scores and in when they stop."""
    params = jax.jit(built.task.init_params)(jax.random.key(0))
    q_head = {"weight": jax.random.normal(jax.random.key(1), (16, 2)), "bias": jnp.full((2,), -2.0)}
    return jax.device_put(params | {"q_head": q_head}, built.state_shardings.params)


def evaluator(built: experiment.Experiment, split: puzzles.Split, batch: int, steps: int = 3, limit=None) -> Evaluator:
    sources = [f"source{i}" for i in range(int(split.sources.max()) + 1)]
    think = make_think(built.config.model, ThinkingConfig(), None, steps)
    pass_over = puzzle_scores.evaluation(think, split, sources)
    return Evaluator(pass_over, built.mesh, built.specs, batch, limit)


def by_hand(built: experiment.Experiment, params: trm.Params, split: puzzles.Split, steps: int) -> list[dict]:
    """Row by row, batch of one, step by step in Python."""
    model, rows = built.config.model, []
    apply = jax.jit(trm.apply, static_argnums=0)
    for i in range(len(split)):
        tokens = jnp.asarray(split.inputs[i : i + 1], jnp.int32)
        z, stopped = trm.initial_z(model, params, 1, tokens.shape[1]), None
        for step in range(1, steps + 1):
            z, logits, q = apply(model, params, z, tokens, params[TABLE][:1])
            if stopped is None and q[0, 0] > 0:
                stopped = step
        right = (np.asarray(jnp.argmax(logits[0], -1)) == split.labels[i])[split.labels[i] > 0]
        known = bool(q[0, 0] >= 0) == bool(right.all())
        rows.append({"cell": right.mean(), "exact": right.all(), "halt": known, "steps": stopped or steps})
    return rows


@pytest.mark.parametrize(("rows", "batch", "devices"), [(21, 8, 1), (21, 8, 4), (7, 16, 1), (16, 8, 2), (9, 3, 2)])
def test_every_puzzle_counts_once_whatever_the_batch(tmp_path: Path, rows: int, batch: int, devices: int) -> None:
    built = build(tmp_path / "data", rows, 3, devices)
    params, split = knowing(built), read_split(built, "test")
    # A row that the model gets right, so that exact accuracy is not zero throughout.
    answers, _, _ = refine(make_program(built, 5), params, split.inputs[:1])
    split.labels[0] = answers[-1, 0]
    scores = evaluator(built, split, batch, 5)(params)
    expected = by_hand(built, params, split, 5)
    for name, key in (
        ("cell_accuracy", "cell"),
        ("exact_accuracy", "exact"),
        ("halt_accuracy", "halt"),
        ("steps", "steps"),
    ):
        assert scores[name] == pytest.approx(np.mean([row[key] for row in expected]), abs=1e-6), name
        assert len({row[key] for row in expected}) > 1 or rows < 10, f"{name} tells nothing apart"
        for source in range(3):
            part = [row[key] for row, s in zip(expected, split.sources, strict=True) if s == source]
            assert scores[f"{name}/source{source}"] == pytest.approx(np.mean(part), abs=1e-6), name
    assert scores["exact_accuracy"] > 0
    assert scores["count"] == rows
    assert sum(scores[f"count/source{i}"] for i in range(3)) == rows


def test_the_step_of_stopping_is_the_first_at_which_q_fires(tmp_path: Path) -> None:
    built = build(tmp_path / "data", 8, 1, 1)
    params = knowing(built)
    split = read_split(built, "test")
    for bias, steps in ((50.0, 1), (-50.0, 6)):
        eager = params | {"q_head": {"weight": params["q_head"]["weight"], "bias": jnp.full((2,), bias)}}
        assert evaluator(built, split, 8, 6)(eager)["steps"] == steps


def test_more_steps_than_in_training_are_run(tmp_path: Path) -> None:
    """Not many: random weights multiply what two programs round differently about sixfold a step."""
    built = build(tmp_path / "data", 8, 1, 1)
    params, split, steps = knowing(built), read_split(built, "test"), 5
    assert steps > built.config.task.halting.max_steps
    answers, halting, cost = refine(make_program(built, steps), params, split.inputs)
    assert answers.shape == (steps, 8, 16)
    assert halting.shape == (steps, 8)
    assert cost.tolist() == [steps] * 8
    scores = evaluator(built, split, 8, steps)(params)
    assert scores["cost"] == steps
    assert scores["cell_accuracy"] == pytest.approx((answers[-1] == split.labels).mean(), abs=1e-6)


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    built = build(tmp_path / "data", 10, 1, 1)
    params, split = knowing(built), read_split(built, "test")
    counted = []
    scores = evaluator(built, split, 4, limit=6)(params, counted.append)
    assert scores["count"] == 6
    assert counted == [4, 2]
    assert scores["cell_accuracy"] == pytest.approx(np.mean([r["cell"] for r in by_hand(built, params, split, 3)[:6]]))


def test_one_program_serves_all_batches_and_all_evaluations(tmp_path: Path) -> None:
    built = build(tmp_path / "data", 21, 1, 2)
    params = knowing(built)
    scores = evaluator(built, read_split(built, "test"), 8)
    scores.compile(params)
    with jax.no_tracing():
        first = scores(params)
        assert scores(params) == first
