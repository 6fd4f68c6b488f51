import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod.models import layers, trm

SHAPE = trm.PuzzleShape(seq_len=9, vocab_size=5, num_identifiers=3)


def make(**changes) -> trm.TrmConfig:
    fields = {
        "hidden_size": 16,
        "num_layers": 2,
        "H_cycles": 2,
        "L_cycles": 2,
        "mlp_multiple_of": 16,
        "mixing": trm.MlpMixing(),
        "puzzle_embedding": trm.PuzzleTable(width=20, length=2),
        "dtype": "float32",
    }
    return trm.TrmConfig(**(fields | changes))


def forward(config: trm.TrmConfig, params, tokens, rows):
    z = trm.initial_z(config, params, *tokens.shape)
    return jax.jit(trm.apply, static_argnums=0)(config, params, z, tokens, rows)


def test_init_has_the_paper_s_spread() -> None:
    config = make(hidden_size=256, mlp_multiple_of=256)
    params = trm.init(config, trm.PuzzleShape(64, 11, 3), jax.random.key(0))
    mlp = np.asarray(params["layers"]["mlp"]["gate_up"])
    assert mlp.std() == pytest.approx(1 / 16, rel=0.01)
    assert np.abs(mlp).max() <= 2 / 16 / layers.TRUNCATED_STD * 1.0001
    assert np.asarray(params["layers"]["token_mlp"]["gate_up"]).std() == pytest.approx(1 / np.sqrt(66), rel=0.02)
    assert np.asarray(params["embed"]["tokens"]).std() == pytest.approx(1 / 16, rel=0.05)
    assert np.asarray(params["z_init"]["H"]).std() == pytest.approx(1, rel=0.1)
    assert not np.array_equal(params["z_init"]["H"], params["z_init"]["L"])
    assert np.all(np.asarray(params["q_head"]["bias"]) == -5)
    assert not np.asarray(params["q_head"]["weight"]).any()
    assert not np.asarray(params["puzzle_table"]).any()


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize(("H_cycles", "L_cycles"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("positions", [trm.Rope(), trm.Learned(), trm.NoPositions()], ids=lambda p: p.kind)
def test_any_cycles_layers_and_positions(positions, H_cycles: int, L_cycles: int, num_layers: int) -> None:
    mixing = trm.AttentionMixing(num_heads=4, positions=positions)
    config = make(mixing=mixing, H_cycles=H_cycles, L_cycles=L_cycles, num_layers=num_layers)
    params = trm.init(config, SHAPE, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 5)
    z, logits, q = forward(config, params, tokens, jnp.zeros((4, 20)))
    assert logits.shape == (4, 9, 5)
    assert (q.shape, q.dtype) == ((4, 2), jnp.float32)
    assert z.H.shape == (4, 11, 16)
    unrolled = forward(config.model_copy(update={"unroll": True}), params, tokens, jnp.zeros((4, 20)))[1]
    np.testing.assert_allclose(logits, unrolled, rtol=2e-4, atol=2e-5)


def test_without_positions_attention_does_not_see_order_and_with_them_it_does() -> None:
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 5)
    order = jax.random.permutation(jax.random.key(2), 9)
    for positions, blind in ((trm.NoPositions(), True), (trm.Rope(), False), (trm.Learned(), False)):
        mixing = trm.AttentionMixing(num_heads=2, positions=positions)
        config = make(mixing=mixing, puzzle_embedding=trm.NoPuzzleTable())
        params = trm.init(config, SHAPE, jax.random.key(0))
        plain, shuffled = (forward(config, params, t, None)[1] for t in (tokens, tokens[:, order]))
        assert np.allclose(plain[:, order], shuffled, atol=1e-4) == blind, positions


def test_only_the_last_cycle_carries_gradients() -> None:
    """The gradient with three H cycles equals the gradient of one cycle begun where the first two end."""
    config = make(H_cycles=3)
    params = trm.init(config, SHAPE, jax.random.key(0))
    tokens, rows = jax.random.randint(jax.random.key(1), (4, 9), 0, 5), jnp.ones((4, 20))

    def gradient(config: trm.TrmConfig, z: trm.Z):
        def loss(params, rows):
            return jnp.sum(jnp.square(trm.apply(config, params, z, tokens, rows)[1]))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, rows)

    start = trm.initial_z(config, params, 4, 9)
    two = config.model_copy(update={"H_cycles": 2})
    one = config.model_copy(update={"H_cycles": 1})
    middle = jax.jit(trm.apply, static_argnums=0)(two, params, start, tokens, rows)[0]
    for a, b in zip(jax.tree.leaves(gradient(config, start)), jax.tree.leaves(gradient(one, middle)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_the_puzzle_row_is_padded_into_the_first_positions() -> None:
    config = make()
    params = trm.init(config, SHAPE, jax.random.key(0))
    rows = jnp.arange(1.0, 21.0)[None]
    x = trm.embed(config, params, jnp.zeros((1, 9), jnp.int32), rows)
    expected = 4 * np.concatenate([np.arange(1.0, 21.0), np.zeros(12)]).reshape(2, 16)
    np.testing.assert_allclose(x[0, :2], expected, rtol=1e-6)
    np.testing.assert_allclose(x[0, 2], 4 * params["embed"]["tokens"][0], rtol=1e-6)


@pytest.mark.parametrize(("mixing", "tera"), [(trm.MlpMixing(), 32.8), (trm.AttentionMixing(num_heads=8), 36.6)])
def test_flops_of_the_paper_s_model(mixing, tera: float) -> None:
    config = make(
        hidden_size=512,
        H_cycles=3,
        L_cycles=6,
        mlp_multiple_of=256,
        mixing=mixing,
        puzzle_embedding=trm.PuzzleTable(width=512, length=16),
    )
    assert 768 * trm.count_matmul_flops(config, trm.PuzzleShape(81, 11, 1)) / 1e12 == pytest.approx(tera, abs=0.1)
