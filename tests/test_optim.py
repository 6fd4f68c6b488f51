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
    Matrix,
    MuonConfig,
    RowGradients,
    TableOptimizer,
    batch_scale,
    build_optimizer,
    orthogonalise,
    update_rows,
)


def scheduled(schedule: Constant | Cosine, total_steps: int):
    optimizer = build_optimizer(AdamWConfig(learning_rate=1.0, schedule=schedule), 1, total_steps)
    return lambda step: float(optimizer.share(optimizer.settings, jnp.int32(step)))


def updates_of(config, grads, state, params, matrices=()):
    optimizer = build_optimizer(config, 1, 10, matrices)
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


@pytest.mark.parametrize("shape", [(3, 24, 60), (2, 60, 24), (1, 32, 32)])
def test_orthogonalised_matrices_keep_their_directions_and_lose_their_lengths(shape: tuple[int, ...]) -> None:
    given = np.random.default_rng(0).normal(size=shape).astype(np.float32) * 1e-4
    for before, after in zip(given, np.asarray(orthogonalise(jnp.asarray(given))), strict=True):
        u, lengths, vt = np.linalg.svd(before.astype(np.float64), full_matrices=False)
        turned = u.T @ after @ vt.T
        found = np.diag(turned)
        assert np.abs(turned - np.diag(found)).max() < 1e-4
        well = lengths > 0.1 * lengths.max()
        assert found[well].min() > 0.65
        assert found.max() < 1.25
    assert not np.any(orthogonalise(jnp.zeros(shape)))


@jax.numpy_dtype_promotion("standard")  # Optax raises a float to an integer
@jax.numpy_rank_promotion("allow")
def test_the_first_step_of_muon_is_that_of_optax_and_adam_has_the_rest() -> None:
    """At the first step momentum has no say; theirs corrects it for bias afterwards, ours does not."""
    config = MuonConfig(
        learning_rate=0.02, weight_decay=0.1, adam={"learning_rate": 0.001, "weight_decay": 0.5}, clip_norm=1.0
    )
    matrices = ((r"layers\..*", Matrix((0,), (1,))),)
    theirs = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            0.02,
            weight_decay=0.1,
            adam_b2=0.95,
            adam_learning_rate=0.001,
            adam_weight_decay=0.5,
            nesterov=False,
            muon_weight_dimension_numbers={
                "layers": {"up": optax.contrib.MuonDimensionNumbers(), "down": optax.contrib.MuonDimensionNumbers()},
                "head": None,
                "bias": None,
            },
        ),
    )
    random = np.random.default_rng(0)
    shapes = {"layers": {"up": (8, 24), "down": (24, 8)}, "head": (8, 5), "bias": (5,)}
    params, grads = (
        jax.tree.map(
            lambda s: jnp.asarray(random.normal(size=s), jnp.float32), shapes, is_leaf=lambda s: type(s) is tuple
        )
        for _ in range(2)
    )
    ours_updates, state = updates_of(config, grads, None, params, matrices)
    theirs_updates, _ = theirs.update(grads, theirs.init(params), params)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours_updates), jax.tree.leaves(theirs_updates), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-7, err_msg=jax.tree_util.keystr(path))
    # One moment for matrices, two for the rest, and Adam's count.
    assert sum(x.size for x in jax.tree.leaves(state)) == 2 * 8 * 24 + 2 * (8 * 5 + 5) + 1


def test_muon_by_hand_on_stacked_matrices() -> None:
    """[layers, inputs, 2, outputs]: of each layer, gate and up are matrices of their own."""
    config = MuonConfig(learning_rate=0.1, weight_decay=0.5, momentum=0.8)
    matrices = (("gate_up", Matrix((1,), (3,))), ("out", Matrix((1, 2), (3,))))
    random = np.random.default_rng(1)
    shapes = {"gate_up": (2, 4, 2, 9), "out": (3, 2, 3, 4)}
    p = {name: random.normal(size=shape) for name, shape in shapes.items()}
    params = {name: jnp.asarray(x, jnp.float32) for name, x in p.items()}
    state, m = None, {name: np.zeros(shape) for name, shape in shapes.items()}

    def one(x: np.ndarray) -> np.ndarray:
        y = x / np.linalg.norm(x)
        for _ in range(5):
            square = y @ y.T
            y = 3.4445 * y - 4.7750 * square @ y + 2.0315 * square @ square @ y
        return y * max(1, x.shape[1] / x.shape[0]) ** 0.5

    for _ in range(3):
        g = {name: random.normal(size=shape) for name, shape in shapes.items()}
        grads = {name: jnp.asarray(x, jnp.float32) for name, x in g.items()}
        updates, state = updates_of(config, grads, state, params, matrices)
        params = optax.apply_updates(params, updates)
        m = {name: 0.8 * m[name] + 0.2 * g[name] for name in m}
        ahead = {name: 0.8 * m[name] + 0.2 * g[name] for name in m}
        turned = {name: np.empty(shape) for name, shape in shapes.items()}
        for layer in range(2):
            for half in range(2):
                turned["gate_up"][layer, :, half] = one(ahead["gate_up"][layer, :, half])
        for layer in range(3):
            turned["out"][layer] = one(ahead["out"][layer].reshape(6, 4)).reshape(2, 3, 4)
        p = {name: p[name] - 0.1 * (turned[name] + 0.5 * p[name]) for name in p}
        for name in p:
            np.testing.assert_allclose(params[name], p[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_batch_scales_both_rates_of_muon() -> None:
    config = MuonConfig(
        learning_rate=0.02, adam={"learning_rate": 1e-4}, batch_scaling=BatchScaling(kind="linear", base_batch=4)
    )
    settings = build_optimizer(config, 8, 10).settings
    assert settings["learning_rate"] == pytest.approx(0.04)
    assert settings["adam_learning_rate"] == pytest.approx(2e-4)


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
