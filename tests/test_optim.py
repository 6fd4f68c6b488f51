import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinypod.optim import (
    AdamAtan2Config,
    AdamWConfig,
    BatchScaling,
    Constant,
    Cosine,
    LionConfig,
    RowGradients,
    TableOptimizer,
    batch_scale,
    build_optimizer,
    update_rows,
)


def scheduled(schedule: Constant | Cosine, total_steps: int):
    optimizer = build_optimizer(AdamWConfig(learning_rate=1.0, schedule=schedule), 1, total_steps)
    return lambda step: float(optimizer.share(optimizer.settings, jnp.int32(step)))


def updates_of(config, grads, state, params):
    optimizer = build_optimizer(config, 1, 10)
    settings = {name: jnp.float32(value) for name, value in optimizer.settings.items()}
    state = optimizer.init(params) if state is None else state
    return optimizer.update(grads, state, params, settings, jnp.float32(1))


def test_constant_warms_up_from_the_first_step() -> None:
    schedule = scheduled(Constant(warmup_steps=4), 100)
    assert [schedule(s) for s in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert scheduled(Constant(), 100)(0) == 1.0


def test_cosine_falls_to_its_floor_at_the_last_step() -> None:
    schedule = scheduled(Cosine(warmup_steps=10, min_ratio=0.1), 110)
    assert schedule(4) == pytest.approx(0.5)
    assert schedule(9) == pytest.approx(1.0)
    assert schedule(59) == pytest.approx(0.55)  # half way down
    assert schedule(109) == pytest.approx(0.1)
    assert schedule(500) == pytest.approx(0.1)
    values = [schedule(s) for s in range(10, 110)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("kind", "expected"), [("linear", 8.0), ("sqrt", 8**0.5)])
def test_rates_scale_with_the_batch(kind: str, expected: float) -> None:
    scaling = BatchScaling(kind=kind, base_batch=768)
    assert batch_scale(scaling, 6144) == pytest.approx(expected)
    config = AdamAtan2Config(
        learning_rate=1e-4, batch_scaling=scaling, tables=TableOptimizer(learning_rate=1e-2, weight_decay=0.0)
    )
    optimizer = build_optimizer(config, 6144, 10)
    assert optimizer.settings["learning_rate"] == pytest.approx(1e-4 * expected)
    assert optimizer.settings["table_learning_rate"] == pytest.approx(1e-2 * expected)


def test_adam_atan2_by_hand() -> None:
    config = AdamAtan2Config(learning_rate=0.1, weight_decay=0.5, beta1=0.8, beta2=0.9)
    params, grads = jnp.array([2.0, -1.0]), [np.array([0.3, -4.0]), np.array([-0.1, 2.0])]
    state = None
    p = np.asarray(params, np.float64)
    m, v = np.zeros(2), np.zeros(2)
    for t, g in enumerate(grads, 1):
        updates, state = updates_of(config, jnp.asarray(g, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        p = p * (1 - 0.1 * 0.5) - 0.1 * np.arctan2(m / (1 - 0.8**t), np.sqrt(v / (1 - 0.9**t)))
        np.testing.assert_allclose(params, p, rtol=1e-6)


@jax.numpy_dtype_promotion("standard")  # Optax raises a float to an integer
def test_adamw_is_optax_adamw_and_clipping_comes_first() -> None:
    config = AdamWConfig(learning_rate=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=1.0)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01, 0.9, 0.95, weight_decay=0.1))
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([[3.0]])}
    grads = jax.tree.map(lambda x: 10 * x, params)
    ours_updates, _ = updates_of(config, grads, None, params)
    theirs_updates, _ = theirs.update(grads, theirs.init(params), params)
    for a, b in zip(jax.tree.leaves(ours_updates), jax.tree.leaves(theirs_updates), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_lion_by_hand() -> None:
    """The update takes the sign of a blend with beta1, before the momentum moves on with beta2."""
    config = LionConfig(learning_rate=0.1, weight_decay=0.5, beta1=0.6, beta2=0.9)
    params = jnp.array([2.0, -1.0, 0.5])
    grads = [np.array([0.3, -4.0, 1.0]), np.array([-0.1, 2.0, -0.05]), np.array([0.0, 0.5, 0.001])]
    state, p, m = None, np.asarray(params, np.float64), np.zeros(3)
    directions = []
    for g in grads:
        updates, state = updates_of(config, jnp.asarray(g, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        blend = 0.6 * m + 0.4 * g
        directions.append(np.sign(blend))
        p = p - 0.1 * (np.sign(blend) + 0.5 * p)
        m = 0.9 * m + 0.1 * g
        np.testing.assert_allclose(params, p, rtol=1e-6)
    assert any((d != np.sign(g)).any() for d, g in zip(directions, grads, strict=True))  # momentum decides somewhere
    assert sum(x.size for x in jax.tree.leaves(state)) == 3 + 1  # one moment, and a count


def test_lion_has_betas_of_its_own() -> None:
    settings = build_optimizer(LionConfig(learning_rate=1e-5), 1, 10).settings
    assert (settings["beta1"], settings["beta2"]) == (0.9, 0.99)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(0, 2**31 - 1))
@pytest.mark.slow
def test_rows_equal_a_dense_update_of_the_rows_present(ids: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    table = random.normal(size=(7, 3)).astype(np.float32)
    values = random.normal(size=(len(ids), 3)).astype(np.float32)
    expected = table.copy()
    for i in set(ids):
        gradient = sum(values[j].astype(np.float64) for j in range(len(ids)) if ids[j] == i)
        expected[i] = table[i] * (1 - 0.1 * 0.5) - 0.1 * np.sign(gradient)
    grads = RowGradients(jnp.asarray(ids, jnp.int32), jnp.asarray(values))
    actual = update_rows(jnp.asarray(table), grads, jnp.float32(0.1), jnp.float32(0.5))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
