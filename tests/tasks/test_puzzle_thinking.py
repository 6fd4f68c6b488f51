"""Views, trajectories and the choice among them, against the same done one chain at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from test_puzzle_scores import knowing

from fixtures import BOX, info_4x4, read_split, split_4x4, tiny_config, write_4x4
from tinypod import experiment, sharding
from tinypod.data import puzzles, sudoku, sudoku_generator
from tinypod.data.puzzles import ExpectedPlain
from tinypod.data.sudoku import FIRST_DIGIT
from tinypod.data.views import fixed_views, sudoku_view
from tinypod.errors import ConfigError
from tinypod.evaluate import Evaluator
from tinypod.models import trm
from tinypod.solve.refine import make_program, refine
from tinypod.tasks import puzzle_thinking
from tinypod.tasks.puzzle import make_thinking
from tinypod.tasks.puzzle_thinking import (
    Choice,
    ThinkingConfig,
    Thought,
    choose,
    make_think,
    sudoku_rules,
    until_stopped,
)

VIEW, STEPS = sudoku_view(BOX, 6), 3
NOISY = "task.thinking={views: 3, trajectories: 2, noise: 0.7, choose: CHOOSE}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking") / "data"
    puzzles.write_dataset(folder, info_4x4(2), {"train": split_4x4(4, 1), "test": split_4x4(13, 2, 2)})
    return folder


@pytest.fixture(scope="module")
def built(data: Path) -> experiment.Experiment:
    return experiment.build(tiny_config(data), jax.devices()[:1])


def think(built: experiment.Experiment, inputs: np.ndarray, **settings):
    program = jax.jit(make_think(built.config.model, ThinkingConfig(**settings), VIEW, STEPS))
    return jax.device_get(program(knowing(built), jnp.asarray(inputs, jnp.int32), jnp.zeros(len(inputs), jnp.int32)))


def chosen(kind: str, answers: np.ndarray, lead: np.ndarray, step: int) -> tuple[list[int], float, int]:
    """Of chains, in loops: answers [N, C, S], lead [N, C] -> after a step (from 0) the answer, what the one that speaks
    for it says, and what the whole has cost."""
    steps, chains, cells = answers.shape
    if kind in ("first", "settled"):
        ends = lead > 0
        if kind == "settled":
            ends[0] = False
            ends[1:] &= (answers[1:] == answers[:-1]).all(axis=-1)
        firsts = [n for n in range(steps) if ends[n].any()]
        stopped = firsts[0] if firsts else steps - 1
        at = min(step, stopped)
        chain = int(np.where(ends[at], lead[at], lead[at] - 1000 * ends[at].any()).argmax())
        return (
            answers[at, chain].tolist(),
            min(lead[at, chain], np.inf if ends[at].any() else 0),
            chains * (stopped + 1),
        )
    if kind == "confident":
        chain = int(lead[step].argmax())
        return answers[step, chain].tolist(), lead[step, chain], chains * steps
    voted = []
    for cell in range(cells):
        votes: dict[int, float] = {}
        for chain in range(chains):
            digit = int(answers[step, chain, cell])
            votes[digit] = votes.get(digit, 0.0) + 1 / (1 + np.exp(-np.float64(lead[step, chain])))
        voted.append(max(votes, key=lambda digit: votes[digit]))
    gave = [lead[step, c] for c in range(chains) if answers[step, c].tolist() == voted]
    return voted, max(gave) if gave else lead[step].min(), chains * steps


@pytest.mark.parametrize("kind", ["vote", "confident", "first", "settled"])
@pytest.mark.parametrize("continues", [False, True])
def test_the_choice_is_that_of_loops(kind: str, continues: bool) -> None:
    random = np.random.default_rng(0)
    answers = random.integers(1, 4, (5, 30, 4, 3)).astype(np.uint8)
    answers[1:] = np.where(random.random((4, 30, 4, 1)) < 0.5, answers[:-1], answers[1:])  # often as they were
    q = random.normal(-1.0, 2.0, (5, 30, 4, 2)).astype(np.float32)
    q[..., 0] -= 3
    q[:, :5, :, 0] -= 200  # so unsure that float32 has no probability for it
    thinking = ThinkingConfig(choose=kind)
    answers_NBCS, q_NBC2 = jnp.asarray(answers), jnp.asarray(q)

    def step(z: jax.Array, number: jax.Array):
        before = jnp.where(number == 1, 0, answers_NBCS[number - 2])
        return z, *choose(thinking, answers_NBCS[number - 1], q_NBC2[number - 1], before, continues=continues)

    if kind in ("first", "settled"):
        found, steps = jax.device_get(until_stopped(step, jnp.int32(0), 5, (30, 3)))
    else:
        choices = jax.lax.scan(lambda z, number: step(z, number)[:2], jnp.int32(0), jnp.arange(1, 6))[1]
        found, steps = jax.device_get(choices), np.full(30, 5)
    lead = q[..., 0] - q[..., 1] if continues else q[..., 0]
    said = found.q[..., 0] - found.q[..., 1] if continues else found.q[..., 0]
    for puzzle in range(30):
        for step in range(5):
            answer, sure, cost = chosen(kind, answers[:, puzzle], lead[:, puzzle], step)
            assert found.answers[step, puzzle].tolist() == answer
            assert said[step, puzzle] == pytest.approx(sure, abs=1e-4 if kind != "settled" or sure > 0 else 0.3)
            assert (said[step, puzzle] > 0) == (sure > 0)
            assert kind != "settled" or continues or (found.q[step, puzzle, 0] >= 0) == (sure > 0)  # for its accuracy
            assert 4 * steps[puzzle] == cost
    if kind in ("first", "settled"):
        assert len(set(steps.tolist())) > 2  # some stop early, some never
        assert kind == "first" or (lead.max(axis=2) > 0)[0].any()  # not by what is said of an answer that is new


def test_runs_of_a_pack_stop_each_for_itself() -> None:
    """Two in one program, of which one stops after the first step and one never does."""
    q = jnp.broadcast_to(jnp.asarray([1.0, -1.0])[:, None, None, None], (2, 4, 3, 2))
    answers = jnp.arange(2 * 4 * 3 * 5, dtype=jnp.uint8).reshape(2, 4, 3, 5)

    def one(answers_NBS: jax.Array, q_NB2: jax.Array):
        def step(z: jax.Array, number: jax.Array):
            return z + 1, Choice(answers_NBS[number - 1], q_NB2[number - 1]), q_NB2[number - 1, :, 0] > 0

        return until_stopped(step, jnp.int32(0), 4, (3, 5))

    found, steps = jax.device_get(jax.jit(jax.vmap(one))(answers, q))
    assert steps.tolist() == [[1] * 3, [4] * 3]
    assert np.array_equal(found.answers[0], np.broadcast_to(answers[0, :1], (4, 3, 5)))
    assert np.array_equal(found.answers[1], answers[1])


@pytest.mark.parametrize("kind", ["vote", pytest.param("confident", marks=pytest.mark.slow), "first", "settled"])
def test_of_each_step_one_answer_is_kept(built: experiment.Experiment, kind: str) -> None:
    """Of all chains, not theirs: memory that more steps take."""
    puzzles, chains = 64, 8
    arguments = knowing(built), jnp.zeros((puzzles, 16), jnp.int32), jnp.zeros((puzzles,), jnp.int32)

    def temporary_bytes(steps: int) -> int:
        think = make_think(built.config.model, ThinkingConfig(views=chains, choose=kind), VIEW, steps)
        return jax.jit(think).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    more = temporary_bytes(204) - temporary_bytes(4)
    assert more < 200 * puzzles * 16 * chains / 2  # a byte a cell


@pytest.mark.parametrize("kind", ["vote", pytest.param("confident", marks=pytest.mark.slow), "first", "settled"])
def test_views_are_the_puzzle_changed_and_the_answer_changed_back(built: experiment.Experiment, kind: str) -> None:
    """Each view alone, in NumPy, through a program that knows no views."""
    inputs, views = read_split(built, "test").inputs, jax.device_get(fixed_views(VIEW, 3))
    chains = []
    for tokens, cells in zip(*views, strict=True):
        seen = tokens[inputs][:, cells]
        answers, q, _ = think(built, seen)
        back = np.empty_like(answers)
        back[..., cells] = np.argsort(tokens)[np.asarray(answers)]
        chains.append((back, np.asarray(q[..., 0])))
    answers, lead = (np.stack(column, axis=2) for column in zip(*chains, strict=True))
    found = think(built, inputs, views=3, choose=kind)
    for puzzle in range(len(inputs)):
        for step in range(STEPS):
            answer, sure, cost = chosen(kind, answers[:, puzzle], lead[:, puzzle], step)
            assert found.answers[step, puzzle].tolist() == answer
            assert found.q[step, puzzle, 0] == pytest.approx(sure, abs=1e-2)  # a random model amplifies
        assert found.cost[puzzle] == cost
    alone = think(built, inputs)
    assert np.array_equal(alone.answers, answers[:, :, 0])  # the first view is the puzzle itself
    assert not np.array_equal(alone.answers, found.answers)


@pytest.mark.slow
def test_noise_is_the_puzzles_own(built: experiment.Experiment) -> None:
    """Not the batch's: a puzzle has the same answer wherever it stands, and whatever stands beside it."""
    settings = {"views": 2, "trajectories": 3, "noise": 0.5, "noise_at": "every_step", "choose": "confident"}
    inputs = read_split(built, "test").inputs
    together = think(built, inputs, **settings)
    moved = think(built, inputs[[7, 2, 7]], **settings)
    assert np.array_equal(moved.answers, together.answers[:, [7, 2, 7]])
    np.testing.assert_allclose(moved.q, together.q[:, [7, 2, 7]], atol=1e-3)
    # The first trajectory has none: the surest of several is at least as sure as it.
    without = think(built, inputs, views=2, choose="confident")
    lead = together.q[..., 0] - without.q[..., 0]
    assert (lead > -1e-3).all()
    assert (lead > 0.1).any()
    # Each trajectory's answer is mapped back by its own view: with next to no noise, both vote as their view does.
    hardly = think(built, inputs, views=3, trajectories=2, noise=1e-6)
    assert np.array_equal(hardly.answers[0], think(built, inputs, views=3).answers[0])
    at_start = think(built, inputs, **settings | {"noise_at": "start"})
    np.testing.assert_allclose(at_start.q[0], together.q[0], atol=1e-3)
    assert np.abs(at_start.q[1:] - together.q[1:]).max() > 0.1


@pytest.mark.parametrize("choose", ["vote", pytest.param("first", marks=pytest.mark.slow)])
def test_eight_devices_are_one_and_every_source_is_scored(data: Path, choose: str) -> None:
    scores, answers = [], []
    for devices in (1, 8):
        config = tiny_config(data, NOISY.replace("CHOOSE", choose))
        built = experiment.build(config, jax.devices()[:devices])
        params = knowing(built)
        evaluator = Evaluator(built.task.open_evaluation(None), built.mesh, built.specs, 48)
        assert evaluator.batch_size == 8  # as many rows at once as without chains
        evaluator.compile(params)
        with jax.no_tracing():
            scores.append(evaluator(params))
        answers.append(refine(make_program(built), params, read_split(built, "test").inputs))
    one, eight = scores
    assert one == pytest.approx(eight, abs=1e-6)
    grids, halting, cost = answers[0]
    right = (grids[-1] == read_split(built, "test").labels).mean(axis=1)
    assert one["cell_accuracy"] == pytest.approx(right.mean(), abs=1e-6)
    assert one["cell_accuracy/source1"] == pytest.approx(right[1::2].mean(), abs=1e-6)
    assert one["cost"] == pytest.approx(cost.mean())
    assert one["cost/source0"] == pytest.approx(cost[::2].mean())
    stops = np.concatenate([halting[:-1] > 0.5, np.ones((1, 13), bool)])
    first = 1 + stops.argmax(axis=0)
    assert one["steps"] == pytest.approx(first.mean())
    assert cost.tolist() == ([18] * 13 if choose == "vote" else (6 * first).tolist())
    for x, y in zip(*answers, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def with_bias(built: experiment.Experiment, bias: float, weight: float = 1.0) -> trm.Params:
    params = jax.device_get(knowing(built))
    q_head = {"weight": weight * params["q_head"]["weight"], "bias": np.full((2,), bias, np.float32)}
    return jax.device_put(params | {"q_head": q_head}, built.state_shardings.params)


@pytest.fixture
def steps_made(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The numbers of the steps that programs traced from here on have computed since the last call."""
    numbers: set[int] = set()
    make_advance = puzzle_thinking.make_advance

    def counted(*arguments):
        start, advance = make_advance(*arguments)

        def noting(z, number):
            jax.debug.callback(lambda number: numbers.add(int(number)), number)
            return advance(z, number)

        return start, noting

    def since_the_last_call() -> list[int]:
        jax.effects_barrier()
        found = sorted(numbers)
        numbers.clear()
        return found

    monkeypatch.setattr(puzzle_thinking, "make_advance", counted)
    return since_the_last_call


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chains", [{}, {"views": 3, "trajectories": 2, "noise": 0.7, "noise_at": "every_step"}])
def test_what_ends_early_is_what_all_steps_say(data: Path, steps_made, devices: int, chains: dict[str, Any]) -> None:
    """The most confident chain after each of all the steps, up to the step at which it stops."""
    built, steps = experiment.build(tiny_config(data), jax.devices()[:devices]), 7
    placement = sharding.place(built.mesh, built.specs)
    params = with_bias(built, -7.0 if chains else -2.0)  # so that some puzzles stop early, and some never

    def program(kind: str) -> Any:
        thinking = ThinkingConfig(choose=kind, **chains)
        return jax.jit(make_think(built.config.model, thinking, VIEW, steps, placement))

    def compute(program: Any, params: trm.Params, inputs: np.ndarray) -> tuple[Thought, list[int]]:
        batch = {"inputs": inputs.astype(np.int32), "identifiers": np.zeros(len(inputs), np.int32)}
        put = sharding.put(batch, sharding.over_batch(built.mesh))
        return jax.device_get(program(params, put["inputs"], put["identifiers"])), steps_made()

    inputs = split_4x4(64, 3).inputs
    first, confident = program("first"), program("confident")
    full, made = compute(confident, params, inputs)
    assert made == [1, 2, 3, 4, 5, 6, 7]
    stops = full.q[..., 0] > 0
    last = np.where(stops.any(axis=0), stops.argmax(axis=0), steps - 1)
    known = sorted(set(last.tolist()))
    assert (len(known) > 2, known[-1]) == (True, steps - 1)
    for latest in known:
        rows = np.resize(np.flatnonzero(last <= latest), 64)  # of one shape, whatever their number
        found, made = compute(first, params, inputs[rows])
        assert made == list(range(1, latest + 2))
        at = np.minimum(np.arange(steps)[:, None], last[rows][None])
        assert np.array_equal(found.answers, full.answers[at, rows[None]])
        np.testing.assert_allclose(found.q, full.q[at, rows[None]], rtol=1e-5, atol=1e-5)
        assert np.array_equal(found.cost, (last[rows] + 1) * ThinkingConfig(**chains).chains)
    assert compute(first, with_bias(built, 1.0, weight=0.0), inputs)[1] == [1]


def test_evaluation_and_solving_end_when_all_puzzles_have_stopped(data: Path, steps_made) -> None:
    built = experiment.build(tiny_config(data, "task.thinking.choose=first", "task.halting.max_steps=9"))
    params, inputs = with_bias(built, 1.0, weight=0.0), read_split(built, "test").inputs
    evaluator = Evaluator(built.task.open_evaluation(None), built.mesh, built.specs, 16)
    scores = evaluator(params)
    assert (scores["cost"], scores["steps"], scores["count"]) == (1, 1, 13)
    assert steps_made() == [1]
    grids, halting, cost = refine(make_program(built), params, inputs)
    assert steps_made() == [1]
    assert grids.shape == (9, 13, 16)
    assert (grids == grids[:1]).all()
    assert (halting > 0.5).all()
    assert cost.tolist() == [1] * 13
    every_step = experiment.build(tiny_config(data, "task.halting.max_steps=9"))
    refine(make_program(every_step), params, inputs)
    assert steps_made() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("box", [(2, 2), (2, 3), (3, 3)])
def test_an_answer_is_valid_by_the_rules_and_the_clues(box: tuple[int, int]) -> None:
    side, random = box[0] * box[1], np.random.default_rng(0)
    made = sudoku_generator.generate(box, 6, 0)
    answers = np.repeat(made.answers[:, None], 8, axis=1)  # the answer itself, and seven others
    for row in answers:
        for number, grid in enumerate(row[1:]):
            cells = random.choice(side**2, 2, replace=False)
            grid[cells] = grid[cells[::-1]] if number % 2 else random.integers(1, side + 1, 2)
    answers[0, 7] = made.answers[1]  # by the rules, but of another puzzle
    tokens = sudoku.to_tokens(answers)
    tokens[1, 7, 3] = FIRST_DIGIT - 1  # a blank
    found = jax.jit(sudoku_rules(box))(jnp.asarray(tokens), jnp.asarray(sudoku.to_tokens(made.questions), jnp.int32))
    kept = ((made.questions[:, None] == 0) | (answers == made.questions[:, None])).all(axis=-1)
    expected = kept & ~sudoku.breaks_rules(answers, box).any(axis=-1) & (tokens >= FIRST_DIGIT).all(axis=-1)
    assert expected[:, 0].all()
    assert not expected[0, 7]
    assert not expected[1, 7]
    assert (~expected).sum() > 20
    assert np.array_equal(found, expected)


def test_the_first_valid_answer_is_chosen_and_ends_the_thinking(
    built: experiment.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two chains in four steps. Three puzzles: solved at once by both, at step 3 by the less sure one, and never."""
    made = sudoku_generator.generate((2, 2), 3, 0)
    right, questions = sudoku.to_tokens(made.answers), sudoku.to_tokens(made.questions)
    answers = np.full((4, 3, 2, 16), FIRST_DIGIT, np.uint8)  # ones everywhere: wrong
    lead = np.tile(np.array([[[-3.0, -1.0], [2.0, 1.0], [0.5, -0.5]]], np.float32), (4, 1, 1))
    answers[:, 0] = right[0]
    answers[2, 1, 1] = right[1]
    answers[3, 2, 1] = FIRST_DIGIT + 1
    q = np.stack([lead, lead], axis=-1)

    def make_advance(*_: Any) -> tuple[Array, Any]:
        def advance(z: Array, step: Array) -> tuple[Array, Array, Array]:
            return z, jnp.asarray(answers.reshape(4, 6, 16))[step - 1], jnp.asarray(q.reshape(4, 6, 2))[step - 1]

        return jnp.int32(0), advance

    monkeypatch.setattr(puzzle_thinking, "make_advance", make_advance)
    thinking = ThinkingConfig(trajectories=2, noise=1.0, choose="valid")
    program = make_think(built.config.model, thinking, None, 4, rules=sudoku_rules((2, 2)))
    found = jax.jit(program)({}, jnp.asarray(questions, jnp.int32), jnp.zeros(3, jnp.int32))
    assert np.array_equal(found.answers[-1], [right[0], right[1], answers[3, 2, 0]])
    assert np.array_equal(found.answers[1, 1], answers[1, 1, 0])
    assert found.q[-1].tolist() == [[20, -20], [20, -20], [-20, 20]]  # what the rules say, not the model
    assert found.q[:, 1, 0].tolist() == [-20, -20, 20, 20]
    assert found.cost.tolist() == [2, 6, 8]


def test_puzzles_of_unknown_rules_have_no_valid_answers(built: experiment.Experiment) -> None:
    task = built.config.task.model_copy(update={"thinking": ThinkingConfig(choose="valid")})
    info = ExpectedPlain(seq_len=16, vocab_size=6).info("train")
    with pytest.raises(
        ConfigError, match=r"task\.thinking\.choose=valid: the puzzles are of kind 'plain', whose rules"
    ):
        make_thinking(task, built.config.model, info, sharding.ANYWHERE)


def test_a_program_has_all_chains_at_once(built: experiment.Experiment, data: Path) -> None:
    """And costs as many times what one does, which plans and speeds go by."""
    more = experiment.build(tiny_config(data, NOISY.replace("CHOOSE", "vote")), jax.devices()[:1])
    assert more.task.flops(False) == 6 * built.task.flops(False)
    assert more.task.flops(True) == built.task.flops(True)
    assert make_program(more).at_once == 256 // 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{trajectories: 4}", r"task\.thinking: trajectories=4 are all the same without noise; set noise"),
        ("{noise: 0.5}", r"task\.thinking: noise=0\.5 is for trajectories after the first; set trajectories"),
        ("{views: 0}", r"task\.thinking\.views: expected greater than 0"),
        ("{choose: best}", r"task\.thinking\.choose: expected 'vote', 'confident', 'first', 'settled' or 'valid'"),
    ],
)
def test_what_makes_no_sense_is_refused(data: Path, settings: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_config(data, f"task.thinking={settings}")


def test_puzzles_without_known_symmetries_have_no_views(tmp_path: Path) -> None:
    plain = info_4x4(kind="plain", box=None)
    puzzles.write_dataset(tmp_path / "data", plain, {"train": split_4x4(4, 1), "test": split_4x4(4, 2)})
    with pytest.raises(ConfigError, match=r"task\.thinking\.views=8: .*kind 'plain'.*symmetries are not known"):
        experiment.build(tiny_config(tmp_path / "data", "data.augmentations=0", "task.thinking.views=8"))
    with pytest.raises(ConfigError, match=r"data\.reveal=3: .*kind 'plain', and only a Sudoku's answer"):
        experiment.build(tiny_config(tmp_path / "data", "data.augmentations=0", "data.reveal=3"))
    write_4x4(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"data\.reveal=16: expected fewer than the 16 cells"):
        experiment.build(tiny_config(tmp_path / "small", "data.reveal=16"))
    several = "task.thinking={trajectories: 2, noise: 0.5}"
    experiment.build(tiny_config(tmp_path / "data", "data.augmentations=0", several))
