"""What must not change the result of a step: how a batch is cut, and over how many devices it lies."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fixtures import tiny_config, write_4x4
from tinypod import experiment, step
from tinypod.errors import ConfigError
from tinypod.optim import Optimizer
from tinypod.sharding import MeshConfig, make_mesh
from tinypod.tasks.task import Task


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("step") / "data")


def run(data: Path, *overrides: str, devices: int = 1, steps: int = 4) -> tuple[step.TrainState, list[dict]]:
    built = experiment.build(tiny_config(data, *overrides), jax.devices()[:devices])
    state, source = built.init(), built.put_source(built.read_split("train"))
    sums = []
    for _ in range(steps):
        state, one = built.train_step(state, source)
        sums.append(jax.device_get(one))
    return state, sums


def assert_near(a: step.TrainState, b: step.TrainState, tolerance: float) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = max(np.abs(y).max(), 1e-6)
        assert np.abs(x - y).max() / scale <= tolerance, jax.tree_util.keystr(path)


def test_accumulation_of_four_is_one_batch(data: Path) -> None:
    whole, whole_sums = run(data)
    parts, parts_sums = run(data, "accumulation=4")
    assert_near(parts, whole, 2e-4)
    for a, b in zip(parts_sums, whole_sums, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["rows"] == b["rows"] == 16


def test_eight_devices_are_one(data: Path) -> None:
    one, one_sums = run(data)
    eight, eight_sums = run(data, devices=8)
    assert len(eight.carry["halted"].sharding.device_set) == 8
    assert np.array_equal(one.carry["example"]["inputs"], eight.carry["example"]["inputs"])
    assert_near(eight, one, 2e-4)
    assert [float(s["loss"]) for s in eight_sums] == pytest.approx([float(s["loss"]) for s in one_sums], rel=1e-5)


def test_a_batch_that_does_not_divide_is_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"12 rows do not divide over 8 devices .*choose a multiple of 8"):
        experiment.build(tiny_config(data, "batch_size=12")).check_batch()


def test_the_batch_is_a_function_of_seed_and_step(data: Path) -> None:
    def batches(*overrides: str) -> list[np.ndarray]:
        built = experiment.build(tiny_config(data, *overrides), jax.devices()[:1])
        source = built.put_source(built.read_split("train"))
        keys = [jax.random.fold_in(jax.random.key(built.config.seed), n) for n in (1, 2)]
        return [np.asarray(jax.jit(built.task.draw)(source, key)["example"]["inputs"]) for key in keys]

    first, second = batches()
    assert not np.array_equal(first, second)
    assert np.array_equal(batches()[0], first)
    assert np.array_equal(batches("accumulation=2")[1], second)
    assert not np.array_equal(batches("seed=1")[0], first)


def test_rows_stay_until_they_halt(data: Path) -> None:
    """With a Q head that never fires a row keeps its puzzle for max_steps, then takes another."""
    built = experiment.build(tiny_config(data, "task.halting.exploration=0.0"), jax.devices()[:1])
    state, source = built.init(), built.put_source(built.read_split("train"))
    seen, steps = [], []
    for _ in range(4):
        state, _ = built.train_step(state, source)
        seen.append(np.asarray(state.carry["example"]["inputs"]))
        steps.append(np.asarray(state.carry["steps"]).tolist())
    assert np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[0], seen[2])
    assert not np.array_equal(seen[0], seen[3])
    assert [s[0] for s in steps] == [1, 2, 3, 1]


def test_exploration_holds_rows_back(data: Path) -> None:
    """All rows want to stop at once; those that explore must first reach their drawn step."""
    built = experiment.build(tiny_config(data, "task.halting.exploration=1.0"), jax.devices()[:1])
    state, source = built.init(), built.put_source(built.read_split("train"))
    eager = {"weight": state.params["q_head"]["weight"], "bias": jnp.full((2,), 50.0)}
    state = state._replace(params=state.params | {"q_head": eager})
    state, _ = built.train_step(state, source)
    assert not np.asarray(state.carry["halted"]).any()
    for _ in range(2):
        state, _ = built.train_step(state, source)
    assert np.asarray(state.carry["halted"] | (state.carry["steps"] < 3)).all()


def test_frozen_groups_do_not_move_and_all_others_do(data: Path) -> None:
    built = experiment.build(tiny_config(data), jax.devices()[:1])
    before = jax.device_get(built.init().params)
    after, _ = run(data)
    for path, old in jax.tree_util.tree_leaves_with_path(before):
        new = after.params
        for part in path:
            new = new[part.key]
        moved = not np.array_equal(old, new)
        assert moved == (path[0].key != "z_init"), jax.tree_util.keystr(path)
    assert set(after.ema) == {"embed", "layers", "head", "q_head"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_dtypes_keep_float32_weights_and_train(data: Path, dtype: str) -> None:
    state, sums = run(data, f"model.dtype={dtype}", "optimizer.learning_rate=4e-3", steps=40)
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state, state.ema))} <= {
        jnp.dtype("float32"),
        jnp.dtype("int32"),
    }
    assert state.carry["z"].H.dtype == dtype
    losses = [float(s["loss"] / s["rows"]) for s in sums]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


def test_without_table_or_ema(data: Path) -> None:
    off = ("ema_decay=null", "eval.weights=live", "model.puzzle_embedding={kind: none}")
    state, _ = run(data, *off)
    assert state.ema == {}
    assert "puzzle_table" not in state.params


def test_the_step_donates_its_state(data: Path) -> None:
    built = experiment.build(tiny_config(data), jax.devices()[:1])
    state, source = built.init(), built.put_source(built.read_split("train"))
    built.train_step(state, source)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_one_example_weighs_the_same_in_any_part(data: Path) -> None:
    """The loss handed out is a sum over rows: two halves add up to the whole."""
    built = experiment.build(tiny_config(data), jax.devices()[:1])
    state, source = built.init(), built.put_source(built.read_split("train"))
    batch = built.task.draw(source, jax.random.key(0))
    carry = built.task.begin(state.params, state.carry, batch)

    @jax.jit
    def loss(carry, batch):
        rows = {name: state.params[name][ids] for name, ids in built.task.lookup(carry).items()}
        return built.task.loss(state.params, rows, carry, batch)[0]

    halves = [jax.tree.map(lambda x, s=s: x[s], (carry, batch)) for s in (slice(8), slice(8, None))]
    assert float(sum(loss(*half) for half in halves)) == pytest.approx(float(loss(carry, batch)), rel=1e-6)


def regression(data: Path, bad_batches: tuple[int, ...] = ()) -> tuple[Task, Optimizer]:
    """A linear regression as a task: nothing in the step is about puzzles. Chosen batches hold a NaN."""
    built = experiment.build(tiny_config(data), jax.devices()[:1])
    target = jnp.arange(4.0)
    bad_keys = [jax.random.key_data(jax.random.fold_in(jax.random.key(0), number + 1)) for number in bad_batches]

    def draw(source, key):
        x = jax.random.normal(key, (16, 4))
        for bad in bad_keys:
            x = jnp.where(jnp.all(jax.random.key_data(key) == bad), x.at[3, 1].set(jnp.nan), x)
        return {"x": x}

    def loss(params, rows, carry, batch):
        error = jnp.sum((batch["x"] @ (params["w"] - target)) ** 2)
        return error, ({"seen": batch["x"]}, {"loss": error})

    task = dataclasses.replace(
        built.task,
        init_params=lambda key: {"w": jnp.zeros(4)},
        init_carry=lambda params: {"seen": jnp.zeros((16, 4))},
        draw=draw,
        begin=lambda params, carry, batch: carry,
        lookup=lambda carry: {},
        loss=loss,
        frozen=(),
        tables=(),
    )
    return task, built.optimizer


def one_device() -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(data: Path) -> None:
    task, optimizer = regression(data, bad_batches=(1,))
    train_step = jax.jit(step.make_train_step(task, optimizer, 0, 16, accumulation=1, ema_decay=0.9, mesh=one_device()))
    first, _ = train_step(step.make_init(task, optimizer, 0, ema=True)(), {})
    second, sums = train_step(first, {})
    assert int(second.step) == 2
    for old, new in zip(jax.tree.leaves(first)[1:], jax.tree.leaves(second)[1:], strict=True):
        assert np.array_equal(old, new)
    assert {name: float(value) for name, value in sums.items()} == {
        "loss": 0.0,
        "grad_norm": 0.0,
        "updates": 0.0,
        "skipped": 1.0,
    }
    third, sums = train_step(second, {})
    assert float(sums["skipped"]) == 0
    assert not np.array_equal(third.params["w"], second.params["w"])


def test_batches_that_are_left_out_are_never_drawn(data: Path) -> None:
    """Leaving out batch 1 and batches 3 and 4 gives what a run would see that never had them."""
    task, optimizer = regression(data, bad_batches=(1, 3, 4))
    train_step = jax.jit(
        step.make_train_step(task, optimizer, 0, 16, accumulation=1, ema_decay=None, mesh=one_device())
    )
    source = {step.SKIPPED: jnp.asarray([[0, 0], [1, 1], [3, 2]], jnp.int32)}
    state = step.make_init(task, optimizer, 0, ema=False)()
    drawn = []
    for _ in range(4):
        state, sums = train_step(state, source)
        assert float(sums["skipped"]) == 0
        drawn.append(np.asarray(state.carry["seen"]))
    keys = [jax.random.fold_in(jax.random.key(0), number + 1) for number in (0, 2, 5, 6)]
    assert all(np.array_equal(seen, jax.random.normal(key, (16, 4))) for seen, key in zip(drawn, keys, strict=True))


def test_accumulation_splits_the_work_of_each_part_over_the_devices(data: Path) -> None:
    """Parts of neighbouring rows would lie on few devices and be computed by all."""

    def flops(devices: int) -> float:
        built = experiment.build(tiny_config(data, "accumulation=2"), jax.devices()[:devices])
        source = built.put_source(built.read_split("train"))
        return built.train_step.lower(built.abstract_state, source).compile().cost_analysis()["flops"]

    assert flops(8) < flops(1) / 4


def test_a_task_is_all_that_the_step_knows(data: Path) -> None:
    task, optimizer = regression(data)
    train_step = jax.jit(
        step.make_train_step(task, optimizer, 0, 16, accumulation=2, ema_decay=None, mesh=one_device())
    )
    state = step.make_init(task, optimizer, 0, ema=False)()
    _, first = train_step(state, {})
    for _ in range(60):
        state, sums = train_step(state, {})
    assert float(sums["loss"]) < float(first["loss"])
