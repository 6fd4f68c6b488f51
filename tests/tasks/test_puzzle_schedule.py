"""Annealed exploration and a curriculum on recursion: functions of the step, in one program."""

from io import StringIO
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fixtures import Steps, tiny_config, write_4x4
from test_step import assert_near
from test_training import assert_same_states, state_at
from tinypod import experiment, training
from tinypod.errors import ConfigError
from tinypod.planning import analysis
from tinypod.planning.planner import make_plan
from tinypod.runs.folder import Run
from tinypod.runs.metrics import MetricsLog
from tinypod.tasks.puzzle_schedule import Linear, Stage, curriculum_settings, exploration_settings, make_at_step

STAGES = "[{until_step: 2, H_cycles: 1, L_cycles: 1}, {until_step: 4, H_cycles: 1, L_cycles: 2}]"
CURRICULUM = (f"task.curriculum={STAGES}", "model.H_cycles=2", "model.L_cycles=3")
ANNEALED = "task.halting.exploration={kind: linear, initial: 1.0, final: 0.0, steps: 4}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("schedule") / "data")


def build(data: Path, *overrides: str, devices: int = 1) -> experiment.Experiment:
    return experiment.build(tiny_config(data, *overrides), jax.devices()[:devices])


def explorations(exploration: float | Linear) -> list[float]:
    varied = {name: jnp.float32(value) for name, value in exploration_settings(exploration).items()}
    at_step = jax.jit(make_at_step(0))
    return [float(at_step(varied, jnp.int32(step))["exploration"]) for step in (0, 1, 5, 10, 1000)]


def test_exploration_goes_in_a_line_to_its_final_value() -> None:
    assert explorations(Linear(initial=0.5, final=0.1, steps=10)) == pytest.approx([0.5, 0.46, 0.3, 0.1, 0.1])
    assert explorations(Linear(initial=0.0, final=1.0, steps=1)) == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert explorations(0.1) == [float(np.float32(0.1))] * 5


def test_each_stage_lasts_until_its_step() -> None:
    model = tiny_config(Path(), "model.H_cycles=3", "model.L_cycles=6").model
    stages = [Stage(until_step=2, H_cycles=1, L_cycles=2), Stage(until_step=5, H_cycles=2, L_cycles=4)]
    settings = exploration_settings(0.1) | curriculum_settings(stages, model)
    varied = {name: jnp.float32(value) for name, value in settings.items()}
    at_step = jax.jit(make_at_step(2))
    now = [at_step(varied, jnp.int32(step)) for step in range(7)]
    assert [(int(one["H_cycles"]), int(one["L_cycles"])) for one in now] == 2 * [(1, 2)] + 3 * [(2, 4)] + 2 * [(3, 6)]


def test_annealed_exploration_is_what_the_step_draws_with(data: Path) -> None:
    """All rows want to stop at once. At first every row explores and none may; in the end all stop."""
    built = build(data, ANNEALED, "optimizer.learning_rate=0.0")
    state, take = built.init(), Steps(built)
    eager = {"weight": state.params["q_head"]["weight"], "bias": jnp.full((2,), 50.0)}
    state = state._replace(params=state.params | {"q_head": eager})
    stopped = []
    for _ in range(6):
        state, _ = take(state)
        stopped.append(np.asarray(state.carry["halted"]).mean())
    assert stopped[0] == 0
    assert stopped[4:] == [1, 1]


def test_annealing_and_stages_are_settings_of_one_program(data: Path) -> None:
    """Constant or annealed, wherever stages end and however deep they are: another value compiles nothing."""
    base = build(data, *CURRICULUM)
    take = Steps(base)
    take(base.init())
    later = "task.curriculum=[{until_step: 1, H_cycles: 2, L_cycles: 1}, {until_step: 3, H_cycles: 2, L_cycles: 2}]"
    for override in (ANNEALED, later):
        other = build(data, *CURRICULUM, override)
        take.settings = other.put_settings()
        theirs = Steps(other)
        state, reference = base.init_state(other.settings), other.init()
        for _ in range(4):
            (state, sums), (reference, expected) = take(state), theirs(reference)
            assert float(sums["loss"]) == float(expected["loss"]), override
        assert_near(state, reference, 0.0)
    assert base.train_step._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("unroll", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_each_stage_trains_as_a_model_of_its_depth(data: Path, unroll: str) -> None:
    """Every step equals the step of a model that has that stage's cycles and no curriculum."""
    deep = build(data, *CURRICULUM, f"model.unroll={unroll}")
    state, take = deep.init(), Steps(deep)
    for H, L, steps in ((1, 1, 2), (1, 2, 2), (2, 3, 2)):
        shallow = Steps(build(data, f"model.H_cycles={H}", f"model.L_cycles={L}", f"model.unroll={unroll}"))
        for _ in range(steps):
            expected, their_sums = shallow(jax.tree.map(jnp.copy, state))
            state, sums = take(state)
            assert_near(state, expected, 1e-4)
            assert float(sums["loss"]) == pytest.approx(float(their_sums["loss"]), rel=1e-5)
            rows = float(sums["weight"])
            assert (float(sums["H_cycles"]) / rows, float(sums["L_cycles"]) / rows) == (H, L)
            assert float(sums["flops"]) / rows == pytest.approx(shallow.built.task.flops(True), rel=1e-6)
            assert "flops" not in their_sums
    assert deep.train_step._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["{data: 8}", "{data: 2, fsdp: 2, tensor: 2}"])
def test_a_curriculum_is_the_same_on_any_mesh(data: Path, mesh: str) -> None:
    states = []
    for devices, overrides in ((1, ()), (8, (f"mesh={mesh}",))):
        built = build(data, *CURRICULUM, ANNEALED, *overrides, devices=devices)
        state, take = built.init(), Steps(built)
        for _ in range(5):
            state, _ = take(state)
        states.append(state)
    assert_near(states[1], states[0], 5e-4)


@pytest.mark.slow
def test_a_curriculum_packs(data: Path) -> None:
    """Over runs whose stages end at different steps, in one program."""
    variants = [
        (),
        ("task.curriculum=[{until_step: 1, H_cycles: 2, L_cycles: 1}, {until_step: 9, H_cycles: 1, L_cycles: 3}]",),
    ]
    runs = [build(data, *CURRICULUM, *variant) for variant in variants]
    packed = jax.tree.map(lambda *x: jnp.stack(x), *(built.settings for built in runs))
    step = jax.jit(jax.vmap(runs[0].train_step.__wrapped__, in_axes=(0, 0, None, None)))
    state = jax.vmap(runs[0].init_state)(packed)
    feed = runs[0].task.open_feed(runs[0].mesh)
    for number in range(3):
        state, _ = step(state, packed, np.int32(number), feed(number))
    for index, built in enumerate(runs):
        alone, take = built.init(), Steps(built)
        for _ in range(3):
            alone, _ = take(alone)
        assert_near(jax.tree.map(lambda x, index=index: x[index], state), alone, 2e-4)


def test_a_plan_is_of_the_deepest_stage(data: Path) -> None:
    grown, whole = (build(data, *overrides) for overrides in (CURRICULUM, CURRICULUM[1:]))
    assert grown.task.flops(True) == whole.task.flops(True)
    analyses = [analysis.analyse(built)[0] for built in (grown, whole)]
    works = [one.work for one in analyses]
    assert works[0] is not None
    assert works[1] is not None
    assert works[0].flops == pytest.approx(works[1].flops, rel=0.02)
    assert works[0].unknown_loops == ()
    hardware = {"slice": "here", "devices": 1, "usable_bytes": None, "peak_flops": None, "fits": True}
    plans = [
        make_plan(built.config, built.task, one, None, (), **hardware)
        for built, one in zip((grown, whole), analyses, strict=True)
    ]
    assert any("recursion grows: H 1 × L 1 until step 2" in note for note in plans[0].notes)
    assert not any("recursion" in note for note in plans[1].notes)


def test_the_start_says_how_the_recursion_grows_and_a_resumed_run_goes_on_with_it(data: Path, tmp_path: Path) -> None:
    """Stopped in the middle of a stage and of the annealing: the same to the bit as in one go."""
    logged, said = {}, ""
    for name, parts in {"whole": (6,), "parts": (3, 6)}.items():
        run = Run(tmp_path / name)
        for steps in parts:
            console = Console(file=StringIO(), width=300)
            config = tiny_config(data, *CURRICULUM, ANNEALED, f"steps={steps}", "log.every_steps=1", "mesh.devices=1")
            outcome = training.train(config, run, console)
            said = console.file.getvalue()
        assert outcome.step == 6
        logged[name] = [row for row in MetricsLog(run.folder).read() if "train/loss" in row]
    line = "recursion grows: H 1 × L 1 until step 2, H 1 × L 2 until step 4, then H 2 × L 3"
    assert line in said
    rows = [[{k: v for k, v in row.items() if k.startswith("train/")} for row in logged[name]] for name in logged]
    assert rows[0] == rows[1]
    assert_same_states(*(state_at(data, tmp_path / name, 6) for name in logged))
    assert [row["train/H_cycles"] for row in rows[0]] == [1, 1, 1, 1, 2, 2]
    assert [row["train/L_cycles"] for row in rows[0]] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.halting.exploration=2.0", r"task\.halting\.exploration: expected less than or equal to 1, got 2\.0$"),
        ("task.halting.exploration=much", r"task\.halting\.exploration: expected a valid number, got 'much'$"),
        ("task.halting.exploration={initial: 0.5}", r"task\.halting\.exploration: needs a `kind`"),
        ("task.halting.exploration={kind: cosine}", r"task\.halting\.exploration: no kind 'cosine'"),
        ("task.halting.exploration={kind: linear, initial: 0.5, final: 0.1}", r"exploration\.steps: missing"),
        (
            "task.curriculum=[{until_step: 5, H_cycles: 1, L_cycles: 1}, {until_step: 5, H_cycles: 2, L_cycles: 1}]",
            r"task: curriculum: the until_step of a stage must be later than the one before it, got \[5, 5\]",
        ),
        ("task.curriculum=[{until_step: 5, H_cycles: 0, L_cycles: 1}]", r"task\.curriculum.*greater than 0"),
        (
            "task.curriculum=[{until_step: 5, H_cycles: 1, L_cycles: 9}]",
            r"task\.curriculum: L_cycles=9 of stage 0 is more than model\.L_cycles=1, .*; raise that, or lower",
        ),
    ],
)
def test_what_cannot_be_is_refused(data: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(data, override)
