import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod import sharding
from tinypod.models import layers, trm
from tinypod.sharding import ANYWHERE, MeshConfig, Placement

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


@pytest.mark.parametrize(("H_cycles", "L_cycles", "num_layers"), [(1, 1, 3), (3, 2, 1)])
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


@jax.jit
def written_out(weights, h):
    """The network by its definition (MLP mixing), over transposed copies; one layer after the other."""

    def swiglu(part, i, x):
        wide = x @ part["gate_up"][i].reshape(x.shape[-1], -1)
        gate, up = jnp.split(wide, 2, axis=-1)
        return (gate / (1 + jnp.exp(-gate)) * up) @ part["down"][i]

    def norm(x):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    for i in range(2):
        across = jnp.swapaxes(h, 1, 2)
        h = jnp.swapaxes(norm(across + swiglu(weights["token_mlp"], i, across)), 1, 2)
        h = norm(h + swiglu(weights["mlp"], i, h))
    return h


class WrittenOut:
    """Three H and four L cycles of each variant, as loops over `written_out`."""

    def __init__(self, **variant: bool) -> None:
        self.config = make(H_cycles=3, L_cycles=4, **variant)
        params = trm.init(self.config, SHAPE, jax.random.key(0))
        q_head = {"weight": jax.random.normal(jax.random.key(3), (16, 2)), "bias": jnp.array([0.5, -0.25])}
        self.params = params | {"q_head": q_head}
        self.tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 5)
        self.rows = jax.random.normal(jax.random.key(2), (4, 20))

    def x(self, params):
        padded = jnp.pad(self.rows, ((0, 0), (0, 12))).reshape(4, 2, 16)
        return 4.0 * jnp.concatenate([padded, params["embed"]["tokens"][self.tokens]], axis=1)

    def start(self, name):
        return jnp.broadcast_to(self.params["z_init"][name], (4, 11, 16))

    def outputs(self, params, answer):
        return answer[:, 2:] @ params["head"], answer[:, 0] @ params["q_head"]["weight"] + params["q_head"]["bias"][
            None
        ]


def assert_alike(ours, theirs, tolerance: float = 2e-4) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        error = np.linalg.norm(np.asarray(a) - np.asarray(b)) / max(np.linalg.norm(b), 1e-30)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


@pytest.mark.parametrize("unroll", [False, True], ids=["looped", "unrolled"])
def test_a_single_z_written_out(unroll: bool) -> None:
    case = WrittenOut(single_z=True)
    params, x, z = case.params, case.x(case.params), case.start("L")
    for _ in range(3):
        for _ in range(4):
            z = written_out(params["layers"], z + x)
        z = written_out(params["layers"], z)
    config = case.config.model_copy(update={"unroll": unroll})
    ours, logits, q = forward(config, params, case.tokens, case.rows)
    assert_alike((ours, logits, q), ((z,), *case.outputs(params, z)))
    assert set(params["z_init"]) == {"L"}


@pytest.mark.parametrize("unroll", [False, True], ids=["looped", "unrolled"])
def test_separate_nets_written_out(unroll: bool) -> None:
    case = WrittenOut(separate_nets=True)
    params, x, z_H, z_L = case.params, case.x(case.params), case.start("H"), case.start("L")
    for _ in range(3):
        for _ in range(4):
            z_L = written_out(params["layers_L"], z_L + z_H + x)
        z_H = written_out(params["layers_H"], z_H + z_L)
    config = case.config.model_copy(update={"unroll": unroll})
    ours, logits, q = forward(config, params, case.tokens, case.rows)
    assert_alike((ours, logits, q), ((z_H, z_L), *case.outputs(params, z_H)))
    weights = [np.asarray(x).reshape(-1) for x in jax.tree.leaves((params["layers_H"], params["layers_L"]))]
    assert len({x[:8].tobytes() for x in weights}) == len(weights)  # no two of them start alike


def test_separate_nets_have_twice_the_weights_and_one_net_is_as_before() -> None:
    shared, separate = (trm.init(make(separate_nets=on), SHAPE, jax.random.key(0)) for on in (False, True))
    assert jax.tree.map(jnp.shape, shared["layers"]) == jax.tree.map(jnp.shape, separate["layers_H"])
    assert_alike(shared["layers"], separate["layers_L"], 1e-9)
    assert set(shared) == {"embed", "layers", "head", "q_head", "z_init", "puzzle_table"}
    assert set(separate) - set(shared) == {"layers_H", "layers_L"}
    assert set(shared) - set(separate) == {"layers"}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({}, id="plain"),
        pytest.param({"separate_nets": True}, id="separate", marks=pytest.mark.slow),
        pytest.param({"single_z": True}, id="single", marks=pytest.mark.slow),
    ],
)
def test_a_one_step_gradient_goes_through_the_last_update_of_each_state_only(variant: dict[str, bool]) -> None:
    """The states before the last two updates are computed apart, and are constants of what is differentiated."""
    case = WrittenOut(one_step_gradient=True, **variant)
    single, separate = case.config.single_z, case.config.separate_nets

    def think(params, z_H, z_L):
        net = params["layers_L" if separate else "layers"]
        return written_out(net, z_L + case.x(params) + (0 if single else z_H))

    def answer(params, z_H, z_L):
        return written_out(params["layers_H" if separate else "layers"], z_L if single else z_H + z_L)

    z_H, z_L = case.start("L" if single else "H"), case.start("L")
    for turn in range(3):
        for _ in range(4 if turn < 2 else 3):
            z_L = think(case.params, z_H, z_L)
        if turn < 2:
            z_H = answer(case.params, z_H, z_L)
            z_L = z_H if single else z_L

    def theirs(params):
        logits, q = case.outputs(params, answer(params, z_H, think(params, z_H, z_L)))
        return jnp.sum(logits**2) + jnp.sum(q**2)

    def ours(params, config=case.config):
        z = trm.initial_z(config, params, 4, 9)
        _, logits, q = trm.apply(config, params, z, case.tokens, case.rows)
        return jnp.sum(logits**2) + jnp.sum(q**2)

    differentiate = jax.jit(jax.value_and_grad(ours), static_argnums=1)
    (our_loss, found), (loss, expected) = differentiate(case.params), jax.jit(jax.value_and_grad(theirs))(case.params)
    assert float(our_loss) == pytest.approx(float(loss), rel=1e-4)
    trained = [name for name in found if name not in ("z_init", "puzzle_table")]
    assert_alike(*({name: grads[name] for name in trained} for grads in (found, expected)), 1e-3)
    # The forward pass is that of the whole gradient; the gradient is not.
    whole = case.config.model_copy(update={"one_step_gradient": False})
    whole_loss, other = differentiate(case.params, whole)
    assert float(whole_loss) == pytest.approx(float(loss), rel=1e-4)
    assert np.linalg.norm(other["embed"]["tokens"] - found["embed"]["tokens"]) > 1e-2


def net_with_a_normalised_gate(config, weights, h, xp=jnp):
    """By the definition, sigmoid(g) · rms(g · v) in each MLP, over transposed copies; in numpy or JAX."""

    def norm(x):
        return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def mlp(part, i, x):
        gate, up = x @ part["gate_up"][i, :, 0], x @ part["gate_up"][i, :, 1]
        return (norm(gate * up) / (1 + xp.exp(-gate))) @ part["down"][i]

    for i in range(2):
        if isinstance(config.mixing, trm.AttentionMixing):
            attention = {name: jnp.asarray(weight[i]) for name, weight in weights["attention"].items()}
            h = norm(h + xp.asarray(layers.attention(attention, jnp.asarray(h), None, ANYWHERE)))
        else:
            across = xp.swapaxes(h, 1, 2)
            h = xp.swapaxes(norm(across + mlp(weights["token_mlp"], i, across)), 1, 2)
        h = norm(h + mlp(weights["mlp"], i, h))
    return h


@pytest.mark.parametrize("scale", [1.0, 0.02])  # the second: products so small that the norm's epsilon counts
@pytest.mark.parametrize("where", ["cpu", "anywhere"])
@pytest.mark.parametrize(
    "mixing",
    [trm.MlpMixing(), trm.AttentionMixing(num_heads=4, positions=trm.NoPositions())],
    ids=["mlp", "attention"],
)
def test_a_normalised_gate_written_out(mixing, where: str, scale: float) -> None:
    """The net, and its gradients against those that JAX finds of the definition."""
    config = make(gate="normalised", mixing=mixing)
    placement = sharding.place(sharding.make_mesh(MeshConfig(devices=1)), {}) if where == "cpu" else ANYWHERE
    weights = jax.tree.map(lambda x: scale * x, trm.init(config, SHAPE, jax.random.key(0))["layers"])
    h, by = jax.random.normal(jax.random.key(1), (2, 4, 11, 16))

    def ours(weights, h):
        return trm.make_net(config, h.shape[1], placement)(weights, h, None)

    def differentiate(net):
        return jax.jit(jax.grad(lambda weights, h: jnp.sum(net(weights, h) * by), argnums=(0, 1)))(weights, h)

    exact = net_with_a_normalised_gate(config, jax.tree.map(np.asarray, weights), np.asarray(h), np)
    np.testing.assert_allclose(jax.jit(ours)(weights, h), exact, rtol=1e-4, atol=1e-5)
    assert_alike(differentiate(ours), differentiate(lambda *given: net_with_a_normalised_gate(config, *given)), 1e-4)


@pytest.mark.slow
def test_the_mean_of_a_normalised_gate_is_over_all_devices_that_share_the_inner_units() -> None:
    config = make(gate="normalised")
    params = trm.init(config, SHAPE, jax.random.key(0))
    # Inner units of very different sizes, so that no part of them has the mean of all.
    for mlp in params["layers"].values():
        mlp["gate_up"] *= jnp.linspace(0.1, 4, mlp["gate_up"].shape[3])[None, None, None]
    tokens, rows = jax.random.randint(jax.random.key(1), (8, 9), 0, 5), jnp.ones((8, 20))

    def loss_and_gradients(mesh: MeshConfig):
        mesh = sharding.make_mesh(mesh)
        specs = sharding.param_specs(trm.sharding_rules(config), params, mesh)
        placement = sharding.place(mesh, specs)

        def loss(params):
            z = trm.initial_z(config, params, 8, 9)
            return jnp.sum(jnp.sin(trm.apply(config, params, z, tokens, rows, placement)[1]))

        placed = jax.device_put(params, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))
        return jax.jit(jax.value_and_grad(loss))(placed)

    one = loss_and_gradients(MeshConfig(devices=1))
    for mesh in (MeshConfig(data=4, tensor=2), MeshConfig(data=2, fsdp=2, tensor=2)):
        assert_alike(loss_and_gradients(mesh), one, 5e-4)


def test_no_kernel_of_another_gate_is_used_with_a_normalised_one(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = sharding.place(sharding.make_mesh(MeshConfig(devices=1)), {})
    sizes = {"hidden_size": 256, "mlp_multiple_of": 256, "dtype": "bfloat16", "unroll": True}
    x = jax.ShapeDtypeStruct((128, 97, 256), jnp.bfloat16)

    def count_kernels(gate: str) -> int:
        """But for those of a residual's norm, which has no gate."""
        config = make(gate=gate, **sizes)
        params = jax.eval_shape(lambda: trm.init(config, trm.PuzzleShape(95, 5, 3), jax.random.key(0)))["layers"]

        def both(params, x):
            fixed = jax.lax.stop_gradient(params)
            detached, weights = trm.make_detached_net(config, {"L": fixed, "H": fixed}, 97, placement)
            last = trm.make_net(config, 97, placement)(params, detached(weights["L"], x, None), None)
            return jnp.sum(last.astype(jnp.float32))

        text = str(jax.make_jaxpr(jax.grad(both))(params, x))
        return len(re.findall(r"pallas_call\[|wgmma_ref", text)) - text.count("name=residual_norm_backward")

    monkeypatch.setattr(sharding.Placement, "kernels", "tpu")
    assert count_kernels("swiglu") > 0
    assert count_kernels("normalised") == 0
    monkeypatch.setattr(sharding.Placement, "kernels", "hopper")  # whose kernels know it
    assert count_kernels("swiglu") == count_kernels("normalised") > 0


VARIANTS = {
    "normalised gate": {"gate": "normalised"},
    "plain": {},
    "single z": {"single_z": True},
    "separate nets": {"separate_nets": True},
    "one-step gradient": {"one_step_gradient": True},
    "remat": {"remat": True},
}


@pytest.mark.parametrize(
    ("variant", "unroll"),
    [
        pytest.param(name, unroll, marks=() if (name, unroll) == ("plain", False) else pytest.mark.slow)
        for name in VARIANTS
        for unroll in (False, True)
    ],
)
def test_fewer_cycles_in_a_deep_program_are_a_shallow_model(variant: str, unroll: bool) -> None:
    """State, outputs and gradients: cycles that are not wanted yet leave no trace. One program for all depths."""
    deep = make(H_cycles=3, L_cycles=3, unroll=unroll, **VARIANTS[variant])
    params = trm.init(deep, SHAPE, jax.random.key(0))
    tokens, rows = jax.random.randint(jax.random.key(1), (4, 9), 0, 5), jnp.ones((4, 20))

    def loss(params, rows, config, cycles):
        z, logits, q = trm.apply(config, params, trm.initial_z(config, params, 4, 9), tokens, rows, ANYWHERE, cycles)
        return jnp.sum(logits**2) + jnp.sum(q**2), (z, logits, q)

    differentiate = jax.grad(loss, argnums=(0, 1), has_aux=True)
    masked = jax.jit(lambda params, rows, cycles: differentiate(params, rows, deep, cycles))
    seen = []
    for H, L in ((1, 1), (2, 3), (3, 2)):
        shallow = deep.model_copy(update={"H_cycles": H, "L_cycles": L})
        expected = jax.jit(differentiate, static_argnums=(2, 3))(params, rows, shallow, None)
        found = masked(params, rows, trm.Cycles(jnp.int32(H), jnp.int32(L)))
        assert_alike(found, expected, 1e-3)
        seen.append(np.asarray(expected[1][1]).tobytes())
    assert len(set(seen)) == len(seen)
    assert masked._cache_size() == 1


def test_flops_follow_the_variant() -> None:
    def count(**changes) -> int:
        return trm.count_matmul_flops(make(H_cycles=3, L_cycles=4, **changes), SHAPE)

    config = make(H_cycles=3, L_cycles=4)
    net, head = trm.count_net_flops(config, SHAPE), trm.count_head_flops(config, SHAPE, training=True)
    assert count() == (3 * 5 + 2 * 5) * net + head
    assert count(single_z=True) == count(separate_nets=True) == count()
    assert count(one_step_gradient=True) == (3 * 5 + 2 * 2) * net + head


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


@pytest.mark.parametrize("unroll", [True, False])
def test_on_a_cpu_a_net_is_products_of_two_matrices_and_the_same_net(unroll: bool) -> None:
    """Forward and backward. Others XLA's CPU compiler copies together first."""
    config = make(unroll=unroll)
    params = trm.init(config, SHAPE, jax.random.key(0))["layers"]
    h, injection = jax.random.normal(jax.random.key(1), (2, 4, 11, 16))
    on_cpu = sharding.place(sharding.make_mesh(MeshConfig(devices=1)), {})

    def loss_and_gradients(placement: Placement):
        def loss(params, h):
            return jnp.sum(jnp.sin(trm.make_net(config, h.shape[1], placement)(params, h, injection)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def dims_of_products(placement: Placement) -> set[int]:
        text = loss_and_gradients(placement).lower(params, h).as_text()
        types = re.findall(r"stablehlo.dot_general.*: \((.*?)\) ->", text)
        return {array.count("x") for types_of_one in types for array in re.findall(r"tensor<(.*?)>", types_of_one)}

    assert dims_of_products(on_cpu) == {2}
    assert max(dims_of_products(ANYWHERE)) > 2
    expected, found = (loss_and_gradients(placement)(params, h) for placement in (ANYWHERE, on_cpu))
    for plain, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, plain, rtol=2e-4, atol=2e-5)
