"""The paper's ablations and another gate as config: each lowers, trains, resumes and costs what it says; the continue
loss."""

from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fixtures import Steps, read_split, tiny_config, write_4x4
from test_step import assert_near, run
from test_training import assert_same_states, state_at
from tinypod import experiment, step, training
from tinypod.errors import ConfigError
from tinypod.evaluate import Evaluator
from tinypod.models import trm
from tinypod.optim import find_matrix
from tinypod.planning import analysis
from tinypod.runs.folder import Run
from tinypod.sharding import path_of
from tinypod.solve.refine import make_program, refine
from tinypod.tasks.puzzle import _cell_losses
from tinypod.tasks.puzzle_thinking import disturb

ABLATIONS = {
    "normalised gate": "model.gate=normalised",
    "single z": "model.single_z=true",
    "separate nets": "model.separate_nets=true",
    "one-step gradient": "model.one_step_gradient=true",
    "continue loss": "task.continue_loss=true",
    "noise in the states": "task.state_noise=0.5",
}
MUON = "optimizer={kind: muon, learning_rate: 0.02, weight_decay: 0.01, adam: {learning_rate: 1e-3}}"
DEEPER = ("model.H_cycles=2", "model.L_cycles=2")
EACH = pytest.mark.parametrize("name", ABLATIONS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("puzzle") / "data")


@EACH
@pytest.mark.parametrize("mixing", ["{kind: mlp}", "{kind: attention, num_heads: 4}"])
@pytest.mark.parametrize("mesh", ["{data: 1}", "{data: 2, fsdp: 2, tensor: 2}"])
def test_it_lowers(data: Path, name: str, mixing: str, mesh: str) -> None:
    devices = 1 if mesh == "{data: 1}" else 8
    config = tiny_config(data, *DEEPER, ABLATIONS[name], f"mesh={mesh}", f"model.mixing={mixing}")
    built = experiment.build(config, jax.devices()[:devices])
    text = built.train_step.lower(*built.abstract_inputs).as_text()
    assert "f64" not in text
    assert name in built.task.description


def test_a_model_without_them_says_nothing_of_them(data: Path) -> None:
    built = experiment.build(tiny_config(data), jax.devices()[:1])
    assert built.task.description == "mlp mixing, float32, puzzles of 16 cells"
    assert built.task.notes == ()


def test_a_halting_head_that_begins_undecided_learns_at_once(data: Path) -> None:
    """Logits of exactly 0, and nothing solved yet: it moves towards going on."""
    state, sums = run(data, "model.stop_bias=0", steps=1)
    assert float(sums[0]["q_loss"] / sums[0]["weight"]) == pytest.approx(np.log(2), rel=1e-5)
    assert float(state.params["q_head"]["bias"][0]) < 0


def test_noise_in_the_states_is_another_for_each_row_and_state() -> None:
    z = trm.Z(*(jnp.full((3, 40, 16), value, jnp.bfloat16) for value in (0.0, 1.0)))
    keys = jax.random.split(jax.random.key(1), 3)
    noisy = disturb(z, keys, 0.5)
    assert [x.dtype for x in noisy] == [jnp.bfloat16, jnp.bfloat16]
    drawn = np.stack([np.asarray(x, np.float32) - np.asarray(old, np.float32) for x, old in zip(noisy, z, strict=True)])
    assert np.abs(drawn.std(axis=(2, 3)) - 0.5).max() < 0.05
    flat = drawn.reshape(6, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(6)).max() < 0.2
    alone = disturb(jax.tree.map(lambda x: x[1:2], z), keys[1:2], 0.5)
    for x, of_three in zip(alone, noisy, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(of_three[1:2], np.float32))


def test_noise_is_drawn_for_each_row_batch_and_seed(data: Path) -> None:
    """What else is drawn stays as it is without noise."""

    def batches(*overrides: str) -> list[dict[str, Any]]:
        built = experiment.build(tiny_config(data, *overrides), jax.devices()[:1])
        take = Steps(built)
        draw = jax.jit(lambda number: step.draw_batch(built.task, take.settings, number, take.feed(0)))
        return [jax.device_get(draw(built.put(np.int32(number)))) for number in (0, 1)]

    quiet, noisy, other = batches(), batches("task.state_noise=0.5"), batches("task.state_noise=0.5", "seed=1")
    drawn = np.concatenate([batch.pop("noise") for batch in (*noisy, *other)])
    assert len(set(drawn.tolist())) == len(drawn) == 4 * len(noisy[0]["min_steps"])
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(quiet), jax.tree.leaves(noisy), strict=True):
        np.testing.assert_array_equal(x, y, jax.tree_util.keystr(path))


def test_noise_is_there_in_training_alone(data: Path) -> None:
    quiet, noisy, again = (run(data, f"task.state_noise={std}", steps=1) for std in (0.0, 0.5, 0.5))
    losses = [float(sums[0]["lm_loss"]) for _, sums in (quiet, noisy, again)]
    assert losses[1] == losses[2]
    assert losses[0] != losses[1]
    scores = []
    for std in (0.0, 0.5):
        built = experiment.build(tiny_config(data, f"task.state_noise={std}"), jax.devices()[:1])
        evaluator = Evaluator(built.task.open_evaluation(None), built.mesh, built.specs, 16)
        scores.append(evaluator(quiet[0].params))
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "normalised gate" else pytest.mark.slow) for name in ABLATIONS]
)
def test_it_trains(data: Path, name: str) -> None:
    state, sums = run(data, *DEEPER, ABLATIONS[name], "optimizer.learning_rate=4e-3", steps=30)
    losses = [float(one["loss"] / one["weight"]) for one in sums]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert sum(float(one["skipped"]) for one in sums) == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


@pytest.mark.slow
@EACH
def test_eight_devices_are_one(data: Path, name: str) -> None:
    one, _ = run(data, *DEEPER, ABLATIONS[name])
    for mesh in ("{data: 8}", "{data: 2, fsdp: 2, tensor: 2}"):
        eight, _ = run(data, *DEEPER, ABLATIONS[name], f"mesh={mesh}", devices=8)
        assert_near(eight, one, 5e-4)


@pytest.mark.slow
def test_both_nets_lie_split_and_are_made_whole_layer_by_layer(data: Path) -> None:
    built = experiment.build(tiny_config(data, ABLATIONS["separate nets"], "mesh={data: 1, fsdp: 8}"))
    for group in ("layers_H", "layers_L"):
        for tree in (built.state_shardings.params, built.state_shardings.ema, built.state_shardings.opt_state[1].mu):
            assert "fsdp" in tree[group]["mlp"]["gate_up"].spec
            assert ("tensor", "fsdp") in tree[group]["token_mlp"]["down"].spec
    text = built.train_step.lower(*built.abstract_inputs).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line or " all-gather-start(" in line]
    assert gathers
    assert not [line for line in gathers if "f32[2,16,2,48]" in line or "f32[2,48,16]" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(tuple(ABLATIONS.values()), id="all of them"),
        *(pytest.param((override,), id=name) for name, override in ABLATIONS.items()),
        pytest.param(("optimizer={kind: lion, learning_rate: 1e-4}",), id="lion"),
        pytest.param((MUON,), id="muon"),
    ],
)
def test_it_resumes_to_the_bit(data: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    for name, parts in {"whole": (4,), "parts": (2, 4)}.items():
        for steps in parts:
            config = tiny_config(data, *overrides, f"steps={steps}", "mesh.devices=1")
            outcome = training.train(config, Run(tmp_path / name), Console(file=StringIO()))
            assert outcome.step == steps
    assert_same_states(*(state_at(data, tmp_path / name, 4) for name in ("whole", "parts")))


@pytest.mark.parametrize("mixing", ["{kind: mlp}", "{kind: attention, num_heads: 4}"])
@pytest.mark.parametrize("nets", [(), ("model.separate_nets=true",)])
def test_muon_has_the_matrices_of_the_layers_and_adam_the_rest(data: Path, mixing: str, nets: tuple[str, ...]) -> None:
    built = experiment.build(tiny_config(data, MUON, *nets, f"model.mixing={mixing}"), jax.devices()[:1])
    params = step.select_trained(built.task, built.abstract_params)
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = path_of(key_path)
        matrix = find_matrix(built.task.matrices, path)
        assert (matrix is not None) == path.startswith("layers"), path
        if matrix is not None:
            inputs, outputs = (int(np.prod([leaf.shape[dim] for dim in dims])) for dims in matrix)
            widths = {"mlp": 16, "token_mlp": 18, "attention": 16}  # 16 cells and 2 positions of the puzzle
            width = widths[path.split(".")[1]]
            assert width in (inputs, outputs), path
            # Gate, up, q, k and v by themselves: what is left over is a stack.
            assert leaf.size == inputs * outputs * 2 * {"gate_up": 2, "qkv": 3}.get(path.split(".")[2], 1), path
    text = built.train_step.lower(*built.abstract_inputs).as_text()
    assert "f64" not in text


@pytest.mark.slow
def test_muon_trains_and_any_mesh_gives_what_one_device_gives(data: Path) -> None:
    _, sums = run(data, MUON, steps=30)
    losses = [float(each["loss"] / each["weight"]) for each in sums]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    one, _ = run(data, MUON, steps=3)
    for mesh in ("{data: 8}", "{data: 2, fsdp: 2, tensor: 2}"):
        eight, _ = run(data, MUON, f"mesh={mesh}", devices=8, steps=3)
        assert_near(eight, one, 2e-3)
    # Its state lies split as the weights do.
    for path, moment in jax.tree_util.tree_leaves_with_path(eight.opt_state):
        if path_of(path).endswith("layers.mlp.down"):
            assert moment.addressable_shards[0].data.size * 4 == moment.size


@pytest.mark.slow
@EACH
def test_it_costs_what_is_counted(data: Path, name: str) -> None:
    """In the compiled program; the embedding by a product is not counted as the model's."""
    built = experiment.build(
        tiny_config(data, "model.H_cycles=2", "model.L_cycles=3", ABLATIONS[name]), jax.devices()[:1]
    )
    work = analysis.analyse(built)[0].work
    assert work is not None
    counted = built.task.flops(True) * built.config.batch_size
    assert work.flops == pytest.approx(counted, rel=0.1)
    plain = experiment.build(tiny_config(data, "model.H_cycles=2", "model.L_cycles=3"), jax.devices()[:1])
    ratio = built.task.flops(True) / plain.task.flops(True)
    expected = {"one-step gradient": (8 + 4) / 16, "continue loss": (8 + 8 + 8) / 16}.get(name, 1.0)
    assert ratio == pytest.approx(expected, rel=0.02)  # the head is counted, too
    assert built.task.flops(False) == plain.task.flops(False)


def opinionated(built: experiment.Experiment) -> step.TrainState:
    """A fresh state whose Q heads tell rows apart."""
    state = built.init()
    q_head = {"weight": jax.random.normal(jax.random.key(5), (16, 2)), "bias": jnp.array([-0.3, 0.2])}
    return state._replace(params=state.params | {"q_head": q_head})


def test_the_continue_loss_written_out(data: Path) -> None:
    """Its target is what both heads say one step later, or the first alone where there is no step after that."""
    overrides = (ABLATIONS["continue loss"], "task.halting.exploration=0.0", "task.q_loss_weight=0.7")
    built = experiment.build(tiny_config(data, *overrides), jax.devices()[:1])
    task, model, params = built.task, built.config.model, opinionated(built).params
    take = Steps(built)
    batch = step.draw_batch(task, take.settings, jnp.int32(0), take.feed(0))
    carry = task.begin(params, built.init().carry, batch)
    carry["steps"] = jnp.arange(16) % 3  # of at most 3: every third row is at its last step
    rows = {name: params[name][ids] for name, ids in task.lookup(carry).items()}

    @jax.jit
    def loss(chosen):
        return task.loss(params | chosen, rows, carry, batch, take.settings.task)

    apply = jax.jit(trm.apply, static_argnums=0)
    z, _, q = apply(model, params, carry["z"], carry["example"]["inputs"], rows["puzzle_table"])
    _, _, later = apply(model, params, z, carry["example"]["inputs"], rows["puzzle_table"])
    q, later = np.asarray(q, np.float64), np.asarray(later, np.float64)
    last = np.arange(16) % 3 == 2
    target = 1 / (1 + np.exp(-np.where(last, later[:, 0], later.max(axis=1))))
    p = 1 / (1 + np.exp(-q[:, 1]))
    expected = -(target * np.log(p) + (1 - target) * np.log(1 - p))
    total, (after, sums) = loss({})
    assert float(sums["q_continue_loss"]) == pytest.approx(expected.sum(), rel=1e-4)
    assert float(total) == pytest.approx(
        float(sums["lm_loss"] + 0.7 * (sums["q_loss"] + sums["q_continue_loss"])), rel=1e-5
    )
    halts = last | (q[:, 0] > q[:, 1])
    assert np.array_equal(after["halted"], halts)
    assert not np.array_equal(halts, last | (q[:, 0] > 0))  # it is the lead that counts here
    assert 0 < halts.sum() < 16

    # The target is a constant: the second head's bias has the gradient of its own cross-entropy alone.
    gradient = jax.grad(lambda bias: loss({"q_head": params["q_head"] | {"bias": bias}})[0])
    found = gradient(params["q_head"]["bias"])
    assert float(found[1]) == pytest.approx(0.7 * float((p - target).sum()), rel=1e-3)


def test_with_a_continue_loss_evaluation_stops_where_halting_leads(data: Path) -> None:
    plain, continuing = (
        experiment.build(tiny_config(data, *overrides), jax.devices()[:1])
        for overrides in ((), (ABLATIONS["continue loss"],))
    )
    params = opinionated(plain).params
    tokens = jnp.asarray(read_split(plain, "test").inputs, jnp.int32)
    z, q = trm.initial_z(plain.config.model, params, *tokens.shape), []
    for _ in range(3):
        rows = params["puzzle_table"][jnp.zeros(len(tokens), jnp.int32)]
        z, _, one = jax.jit(trm.apply, static_argnums=0)(plain.config.model, params, z, tokens, rows)
        q.append(np.asarray(one))
    for built, lead in ((plain, np.stack(q)[..., 0]), (continuing, np.stack(q)[..., 0] - np.stack(q)[..., 1])):
        stops = lead > 0
        stops[-1] = True
        scores = Evaluator(built.task.open_evaluation(None), built.mesh, built.specs, 8)(params)
        assert scores["steps"] == pytest.approx(1 + stops.argmax(axis=0).mean())
        _, probabilities, _ = refine(make_program(built), params, np.asarray(tokens))
        assert np.array_equal(probabilities > 0.5, lead > 0)
    assert not np.array_equal(np.stack(q)[..., 0] > 0, np.stack(q)[..., 0] > np.stack(q)[..., 1])


@pytest.mark.parametrize("kind", ["stablemax", "softmax"])
def test_label_smoothing_spreads_a_share_of_the_target_over_all_tokens(data: Path, kind: str) -> None:
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(3, 16, 6)) * 3, random.integers(2, 6, (3, 16))
    labels[0, :5] = -100
    s = np.where(logits >= 0, logits + 1, 1 / (1 - np.minimum(logits, 0))) if kind == "stablemax" else np.exp(logits)
    log_p = np.log(s / s.sum(axis=-1, keepdims=True))
    for smoothing in (0.0, 0.2):
        config = tiny_config(data, f"task.loss={{kind: {kind}, label_smoothing: {smoothing}}}").task
        found = _cell_losses(config, jnp.asarray(logits, jnp.float32), jnp.asarray(labels))
        for row in range(3):
            cells = [i for i in range(16) if labels[row, i] != -100]
            right = np.mean([-log_p[row, i, labels[row, i]] for i in cells])
            everywhere = np.mean([-log_p[row, i].mean() for i in cells])
            assert found[row] == pytest.approx((1 - smoothing) * right + smoothing * everywhere, rel=1e-5)


def test_epochs_are_offered_and_resumed_by_the_step(data: Path) -> None:
    """40 puzzles in batches of 16: after five, each was offered twice."""
    built = experiment.build(tiny_config(data, "data.sampling=epochs", "data.augmentations=0"), jax.devices()[:1])
    take = Steps(built)
    draw = jax.jit(lambda number: step.draw_batch(built.task, take.settings, number, take.feed(0)))
    batches = [np.asarray(draw(built.put(np.int32(number)))["example"]["inputs"]) for number in range(5)]
    counts = {puzzle: 0 for puzzle in {row.tobytes() for row in read_split(built, "train").inputs.astype(np.int32)}}
    for row in np.concatenate(batches):
        counts[row.tobytes()] += 1
    expected = {puzzle: 0 for puzzle in counts}
    for row in read_split(built, "train").inputs.astype(np.int32):
        expected[row.tobytes()] += 2
    assert counts == expected


def test_epochs_that_cannot_be_are_refused(data: Path) -> None:
    epochs = "data.sampling=epochs"
    with pytest.raises(ConfigError, match=r"data\.sampling=epochs counts up to 4,294,967,296 examples"):
        experiment.build(tiny_config(data, epochs, "steps=300000000"), jax.devices()[:1])
