"""What must not change the result of a step: how a batch is cut, and over how many devices it lies."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fixtures import Steps, tiny_config, write_4x4
from tinypod import experiment, step
from tinypod.errors import ConfigError
from tinypod.optim import Optimizer
from tinypod.sharding import MeshConfig, make_mesh
from tinypod.tasks import task
from tinypod.tasks.task import Task


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("step") / "data")


def run(data: Path, *overrides: str, devices: int = 1, steps: int = 4) -> tuple[step.TrainState, list[dict]]:
    built = experiment.build(tiny_config(data, *overrides), jax.devices()[:devices])
    state, take = built.init(), Steps(built)
    sums = []
    for _ in range(steps):
        state, one = take(state)
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
        assert a["weight"] == b["weight"] == 16


def test_eight_devices_are_one(data: Path) -> None:
    one, one_sums = run(data)
    eight, eight_sums = run(data, devices=8)
    assert len(eight.carry["halted"].sharding.device_set) == 8
    assert np.array_equal(one.carry["example"]["inputs"], eight.carry["example"]["inputs"])
    assert_near(eight, one, 2e-4)
    assert [float(s["loss"]) for s in eight_sums] == pytest.approx([float(s["loss"]) for s in one_sums], rel=1e-5)


@pytest.mark.parametrize(
    ("devices", "overrides"),
    [pytest.param(1, ("accumulation=2",), marks=pytest.mark.slow), (8, ("mesh={data: 4, fsdp: 2}",))],
)
def test_many_steps_in_one_program_are_steps_one_by_one_to_the_bit(
    data: Path, devices: int, overrides: tuple[str, ...]
) -> None:
    """Three at a time; of the second three, only two are steps."""
    one_by_one, sums = run(data, *overrides, devices=devices, steps=5)
    built = experiment.build(tiny_config(data, *overrides), jax.devices()[:devices])
    state, take, many_sums = built.init(), Steps(built), []
    program = built.compile_steps(take.feed(0), 3)
    for numbers in ([0, 1, 2], [3, 4, -1]):
        state, found = program(state, take.settings, built.put(np.array(numbers, np.int32)), take.feed(0))
        many_sums += [{name: np.asarray(x)[i] for name, x in found.items()} for i in range(3) if numbers[i] >= 0]
    assert many_sums == sums
    assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, one_by_one)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(one_by_one), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), jax.tree_util.keystr(path)
        assert x.sharding == y.sharding, jax.tree_util.keystr(path)


def test_a_batch_that_does_not_divide_is_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"12 rows do not divide over 8 devices .*choose a multiple of 8"):
        experiment.build(tiny_config(data, "batch_size=12")).check_batch()


def test_the_batch_is_a_function_of_seed_and_step(data: Path) -> None:
    def batches(*overrides: str) -> list[np.ndarray]:
        built = experiment.build(tiny_config(data, *overrides), jax.devices()[:1])
        take = Steps(built)
        draw = jax.jit(lambda number: step.draw_batch(built.task, take.settings, number, take.feed(0)))
        return [np.asarray(draw(built.put(np.int32(number)))["example"]["inputs"]) for number in (0, 1)]

    first, second = batches()
    assert not np.array_equal(first, second)
    assert np.array_equal(batches()[0], first)
    assert np.array_equal(batches("accumulation=2")[1], second)
    assert not np.array_equal(batches("seed=1")[0], first)


def test_rows_stay_until_they_halt(data: Path) -> None:
    """With a Q head that never fires a row keeps its puzzle for max_steps, then takes another."""
    built = experiment.build(tiny_config(data, "task.halting.exploration=0.0"), jax.devices()[:1])
    state, take = built.init(), Steps(built)
    seen, steps = [], []
    for _ in range(4):
        state, _ = take(state)
        seen.append(np.asarray(state.carry["example"]["inputs"]))
        steps.append(np.asarray(state.carry["steps"]).tolist())
    assert np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[0], seen[2])
    assert not np.array_equal(seen[0], seen[3])
    assert [s[0] for s in steps] == [1, 2, 3, 1]


def test_exploration_holds_rows_back(data: Path) -> None:
    """All rows want to stop at once; those that explore must first reach their drawn step."""
    built = experiment.build(tiny_config(data, "task.halting.exploration=1.0"), jax.devices()[:1])
    state, take = built.init(), Steps(built)
    eager = {"weight": state.params["q_head"]["weight"], "bias": jnp.full((2,), 50.0)}
    state = state._replace(params=state.params | {"q_head": eager})
    state, _ = take(state)
    assert not np.asarray(state.carry["halted"]).any()
    for _ in range(2):
        state, _ = take(state)
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


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_short_dtypes_keep_float32_weights_and_train(data: Path, dtype: str) -> None:
    state, sums = run(data, f"model.dtype={dtype}", "optimizer.learning_rate=4e-3", steps=40)
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state, state.ema))} <= {
        jnp.dtype("float32"),
        jnp.dtype("int32"),
    }
    assert state.carry["z"].H.dtype == dtype
    losses = [float(s["loss"] / s["weight"]) for s in sums]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


def test_without_table_or_ema(data: Path) -> None:
    off = ("ema_decay=null", "eval.weights=live", "model.puzzle_embedding={kind: none}")
    state, _ = run(data, *off)
    assert state.ema == {}
    assert "puzzle_table" not in state.params


def test_the_step_donates_its_state(data: Path) -> None:
    built = experiment.build(tiny_config(data), jax.devices()[:1])
    state = built.init()
    Steps(built)(state, 0)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_one_example_weighs_the_same_in_any_part(data: Path) -> None:
    """The loss handed out is a sum over rows: two halves add up to the whole."""
    built = experiment.build(tiny_config(data), jax.devices()[:1])
    state, take = built.init(), Steps(built)
    batch = step.draw_batch(built.task, take.settings, jnp.int32(0), take.feed(0))
    carry = built.task.begin(state.params, state.carry, batch)

    @jax.jit
    def loss(carry, batch):
        rows = {name: state.params[name][ids] for name, ids in built.task.lookup(carry).items()}
        return built.task.loss(state.params, rows, carry, batch, take.settings.task)[0]

    halves = [jax.tree.map(lambda x, s=s: x[s], (carry, batch)) for s in (slice(8), slice(8, None))]
    assert float(sum(loss(*half) for half in halves)) == pytest.approx(float(loss(carry, batch)), rel=1e-6)


def regression(data: Path, bad_batches: tuple[int, ...] = ()) -> tuple[Task, Optimizer]:
    """A linear regression as a task: nothing in the step is about puzzles. Chosen batches hold a NaN."""
    built = experiment.build(tiny_config(data), jax.devices()[:1])
    target = jnp.arange(4.0)

    def draw(feed, draw, varied):
        x = jax.random.normal(draw.key, (16, 4))
        bad = jnp.isin(draw.number, jnp.asarray(bad_batches or (-1,), jnp.int32))
        return {"x": jnp.where(bad, x.at[3, 1].set(jnp.nan), x)}

    def loss(params, rows, carry, batch, varied):
        error = jnp.sum((batch["x"] @ (params["w"] - target)) ** 2)
        return error, ({"seen": batch["x"]}, {"loss": error, "weight": jnp.float32(batch["x"].shape[0])})

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
        varied={},
        at_step=lambda varied, step: varied,
    )
    return task, built.optimizer


def made(task: Task, optimizer: Optimizer, accumulation: int = 1, ema: bool = False):
    """The first state, and the step as a function of a state and a batch number."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    settings = step.make_settings(task, optimizer, 0, 0.9 if ema else None)
    train_step = jax.jit(step.make_train_step(task, optimizer, accumulation, ema, mesh))
    state = step.make_init(task, optimizer, ema)(settings)
    return state, lambda state, number: train_step(state, settings, np.int32(number), {})


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(data: Path) -> None:
    state, take = made(*regression(data, bad_batches=(1,)), ema=True)
    first, _ = take(state, 0)
    second, sums = take(first, 1)
    assert int(second.step) == 2
    for old, new in zip(jax.tree.leaves(first)[1:], jax.tree.leaves(second)[1:], strict=True):
        assert np.array_equal(old, new)
    expected = {"loss": 0.0, "weight": 0.0, "grad_norm": 0.0, "updates": 0.0, "skipped": 1.0}
    assert {name: float(value) for name, value in sums.items() if name != "learning_rate"} == expected
    third, sums = take(second, 2)
    assert float(sums["skipped"]) == 0
    assert not np.array_equal(third.params["w"], second.params["w"])


def test_the_rate_goes_by_the_step_after_skipped_ones_too(data: Path) -> None:
    """Warm-up over 2 steps; the first two are skipped: the third has the full rate, in the update as in the log."""
    state, take = made(*regression(data, bad_batches=(0, 1)))
    for number in range(2):
        state, sums = take(state, number)
        assert float(sums["learning_rate"]) == pytest.approx(1e-3 * (number + 1) / 2)
    after, sums = take(state, 2)
    assert float(sums["learning_rate"]) == pytest.approx(1e-3)
    moved = np.asarray(after.params["w"] - state.params["w"])
    # Adam-atan2's first update of a weight is at most pi/4 of the rate: atan2(g, |g|).
    assert np.abs(moved).max() == pytest.approx(1e-3 * np.pi / 4, rel=1e-3)


def test_a_batch_is_that_of_its_number(data: Path) -> None:
    """Whatever the step: batches that a rollback leaves out are arithmetic of the host."""
    state, take = made(*regression(data))
    drawn = {}
    for number in (0, 2, 5):
        state, _ = take(state, number)
        drawn[number] = np.asarray(state.carry["seen"])
    _, again = made(*regression(data))
    assert np.array_equal(np.asarray(again(state, 2)[0].carry["seen"]), drawn[2])
    assert len({x.tobytes() for x in drawn.values()}) == 3


@pytest.mark.slow
def test_settings_are_arguments_of_one_program(data: Path) -> None:
    """Seed, rates, decays, betas, warm-up, EMA decay and exploration: another value compiles nothing."""
    base = experiment.build(tiny_config(data), jax.devices()[:1])
    take = Steps(base)
    take(base.init())
    for override in (
        "seed=7",
        "optimizer.learning_rate=3e-3",
        "optimizer.weight_decay=0.3",
        "optimizer.beta1=0.5",
        "optimizer.beta2=0.7",
        "optimizer.schedule.warmup_steps=9",
        "optimizer.tables.learning_rate=0.5",
        "ema_decay=0.5",
        "steps=77",
        "task.halting.exploration=1.0",
        "task.q_loss_weight=3.0",
    ):
        other = experiment.build(tiny_config(data, override), jax.devices()[:1])
        take.settings = other.put_settings()
        theirs = Steps(other)
        state, sums = base.init_state(other.settings), None
        reference = other.init()
        for _ in range(2):
            state, sums = take(state)
            reference, expected = theirs(reference)
        assert float(sums["loss"]) == float(expected["loss"]), override
        assert_near(state, reference, 0.0)
    assert base.train_step._cache_size() == 1
    assert base.init_state._cache_size() == 1


@pytest.mark.slow
def test_a_run_axis_can_be_added_over_the_settings(data: Path) -> None:
    """Two runs in one program, by vmap over state and settings, are the two runs alone."""
    runs = [experiment.build(tiny_config(data, *o), jax.devices()[:1]) for o in ((), ("seed=3", "ema_decay=0.5"))]
    alone = [run(data, *o, steps=3)[0] for o in ((), ("seed=3", "ema_decay=0.5"))]
    packed = jax.tree.map(lambda *x: jnp.stack(x), *(built.settings for built in runs))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    train_step = step.make_train_step(runs[0].task, runs[0].optimizer, 1, True, mesh)
    over_runs = jax.jit(jax.vmap(train_step, in_axes=(0, 0, None, None)))
    state = jax.vmap(step.make_init(runs[0].task, runs[0].optimizer, True))(packed)
    feed = runs[0].task.open_feed(mesh)
    for number in range(3):
        state, _ = over_runs(state, packed, np.int32(number), feed(number))
    for index, expected in enumerate(alone):
        assert_near(jax.tree.map(lambda x, index=index: x[index], state), expected, 2e-4)


def test_no_two_purposes_share_a_key(data: Path) -> None:
    """`split(k)[i]` is `fold_in(k, i)`: weights, batches and fixed views of one seed have roots of their own."""
    seed = 0
    roots = [task.root_key(seed, purpose) for purpose in ("weights", "batches", "views")]
    keys = [jax.random.key_data(key) for root in roots for key in (root, *jax.random.split(root, 64))]
    keys += [jax.random.key_data(key) for root in roots for key in jax.random.split(jax.random.fold_in(root, 3), 8)]
    assert len({np.asarray(key).tobytes() for key in keys}) == len(keys)


@pytest.mark.slow
def test_accumulation_splits_the_work_of_each_part_over_the_devices(data: Path) -> None:
    """Parts of neighbouring rows would lie on few devices and be computed by all."""

    def flops(devices: int) -> float:
        built = experiment.build(tiny_config(data, "accumulation=2"), jax.devices()[:devices])
        return built.train_step.lower(*built.abstract_inputs).compile().cost_analysis()["flops"]

    assert flops(8) < flops(1) / 4


def test_a_task_is_all_that_the_step_knows(data: Path) -> None:
    state, take = made(*regression(data), accumulation=2)
    _, first = take(state, 0)
    for number in range(60):
        state, _ = take(state, number)
    assert float(take(state, 0)[1]["loss"]) < float(first["loss"])
