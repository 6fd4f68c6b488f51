"""The package from Python: the same answers as the commands, and what a notebook needs besides."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fake_compiler
import tinypod
from fixtures import CONFIGS, TINY, write_4x4
from tinypod import cli, training
from tinypod.experiment import ExperimentConfig
from tinypod.solve import display, refine

ROOT = Path(__file__).parents[1]
RECIPE = CONFIGS / "trm" / "sudoku_mlp.yaml"
PUZZLES = ["12..34..........", "....12..34......"]


def command(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("api") / "data")


@pytest.fixture(scope="module")
def model(data: Path) -> tinypod.Model:
    return tinypod.train(RECIPE, TINY, run=data.parent / "run", data={"path": data})


def test_importing_it_imports_no_jax() -> None:
    program = "import sys, tinypod; print('jax' in sys.modules, dir(tinypod)); tinypod.train; tinypod.evaluate_all"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("False")
    assert all(name in done.stdout for name in ("load", "make_sudoku", "plan"))
    assert "no attribute 'evaluate_all'; it has Model" in done.stderr


def test_keys_by_keyword_by_dict_and_as_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ExperimentConfig] = []

    def note(config: ExperimentConfig, *_: object, **__: object) -> None:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", note)
    by_dict = {
        "steps": 9,
        "optimizer.learning_rate": 1e-5,
        "model.hidden_size": np.int64(256),
        "data.path": tmp_path,
        "model.mixing": {"kind": "attention", "num_heads": 2},
    }
    keys = {"steps": np.int32(2), "eval": {"limit": 5}, "checkpoint": {"every_minutes": None}}
    for overrides in (by_dict, [f"{k}={v}".replace("'", "") for k, v in by_dict.items()]):
        with pytest.raises(KeyboardInterrupt):
            tinypod.train(RECIPE, overrides, ema_decay=0.5, **keys)
    config = asked[0]
    assert config == asked[1]
    assert config.steps == 2  # a keyword wins
    assert config.optimizer.learning_rate == 1e-5
    assert (config.model.hidden_size, config.model.mixing.num_heads) == (256, 2)
    assert config.data.path == str(tmp_path)
    assert (config.eval.limit, config.eval.every_steps) == (5, 5000)  # the rest of a section stays
    assert config.checkpoint.every_minutes is None
    with pytest.raises(tinypod.UserError, match=r"stepz: unknown key; did you mean `steps=3`"):
        tinypod.train(RECIPE, TINY, stepz=3)
    with pytest.raises(tinypod.UserError, match=r"mesh\.fsdp: \{1\} is not a number"):
        tinypod.train(RECIPE, {"mesh.fsdp": {1}})
    assert len(asked) == 2


def test_training_again_does_nothing(model: tinypod.Model, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.metrics
    assert tinypod.train(model.run.folder).metrics == before
    assert "nothing left to do at step 10" in capsys.readouterr().out


def test_evaluation_is_that_of_the_command(model: tinypod.Model, data: Path) -> None:
    assert {"step": model.step, "weights": model.weights} | model.evaluate() == json.loads(
        command("eval", model.run, "--json")
    )
    asked = ("--halt-steps", 5, "--limit", 7, "--split", "train", "--json")
    assert (
        model.evaluate("train", limit=7, halt_steps=5).items() <= json.loads(command("eval", model.run, *asked)).items()
    )
    more = model.evaluate(views=2, trajectories=2, noise=0.5, choose="first", halt_steps=None)
    flags = ("--views", 2, "--trajectories", 2, "--noise", 0.5, "--choose", "first", "--json")
    assert more.items() <= json.loads(command("eval", model.run, *flags)).items()
    assert 4 <= more["cost"] <= 12
    with pytest.raises(TypeError, match="unexpected keyword argument 'vews'; expected one of halt_steps, views"):
        model.evaluate(vews=2)
    live = tinypod.load(model.run.folder, checkpoint=5, weights="live")
    assert (live.step, live.weights) == (5, "live")
    other = write_4x4(data.parent / "other", test=3)
    elsewhere = tinypod.load(str(model.run.folder), {"data.path": other})
    assert elsewhere.evaluate()["count"] == 3
    assert elsewhere.config.data.path == str(other)
    with pytest.raises(tinypod.UserError, match="limit=0"):
        model.evaluate(limit=0)
    with pytest.raises(tinypod.UserError, match="nowhere is not a run folder"):
        tinypod.load("nowhere")


def test_metrics_are_flat_rows(model: tinypod.Model) -> None:
    rows = model.metrics
    assert {type(value) for row in rows for value in row.values()} == {int, float}
    assert [row["step"] for row in rows if "train/loss" in row] == [2, 4, 5, 6, 8, 10]
    assert [row["step"] for row in rows if "eval/exact_accuracy" in row] == [5, 10]


def test_puzzles_are_solved_one_by_one_and_together(
    model: tinypod.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = tinypod.load(model.run.folder)
    made = []
    monkeypatch.setattr(refine, "make_program", lambda built, make=refine.make_program: made.append(1) or make(built))
    single = [fresh.solve(puzzle) for puzzle in PUZZLES]
    assert len(made) == 1  # compiling takes seconds: once
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(PUZZLES))
    for together in (fresh.solve_all(PUZZLES), fresh.solve_all(listed)):
        assert [r.answer for r in together] == [r.answer for r in single]
    one = single[0]
    assert one.steps == len(one.answers) == 3
    assert one.answer == one.answers[-1]
    assert set(one.answer) <= set(".1234")
    assert one.confidence == one.halt_probabilities[-1]
    assert fresh.solve(PUZZLES[0], halt_steps=5).steps == 5
    assert fresh.solve(PUZZLES[0], views=2).cost == 6
    assert len(made) == 3
    assert fresh.solve(number=4).question.tolist() != one.question.tolist()
    assert display.verdict(one) in " ".join(command("solve", model.run, PUZZLES[0]).split())
    with pytest.raises(tinypod.UserError, match=r"^'123': puzzle has 3 characters, expected 16"):
        model.solve("123")
    with pytest.raises(tinypod.UserError, match=r"^\[1\] '123': puzzle has 3"):
        model.solve_all([PUZZLES[0], "123"])
    with pytest.raises(tinypod.UserError, match="the list is empty"):
        model.solve_all([])


def test_a_notebook_shows_a_picture_of_an_answer(model: tinypod.Model, tmp_path: Path) -> None:
    drawn = model.solve(PUZZLES[0])._repr_svg_()
    command("solve", str(model.run), PUZZLES[0], "--svg", str(tmp_path / "a.svg"))
    assert drawn == (tmp_path / "a.svg").read_text()
    # Beside other pictures on one page: its styles are for itself alone.
    rules = re.findall(r"^(?!@|}|<)(.*) \{", drawn.partition("<style>")[2].partition("</style>")[0], re.MULTILINE)
    assert rules
    assert all(rule.startswith(".tinypod-solve ") for rule in rules)


def test_plans_are_those_of_the_command(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler.install(monkeypatch, tmp_path, row_mib=40.0)
    roomy = tinypod.plan(RECIPE, {"data.path": data}, slice="v4-64", batch_size=6144)
    assert str(roomy) == repr(roomy)
    assert re.fullmatch(r"v4-64: fits, needs .* of 30\.75 GiB per device, .* per step, .* steps, \$.* spot", str(roomy))
    tight = tinypod.plan(RECIPE, {"data.path": data}, slice=" V4-8", batch_size=6144)
    assert tight.proposal is not None
    assert tight.proposal.fits
    assert str(tight).endswith(f"{' '.join(tight.proposal.overrides)} fits")
    assert tinypod.plan(RECIPE, {"data.path": data}, slice="v4-8", batch_size=6144, search=False).proposal is None
    asked = ("plan", RECIPE, f"data.path={data}", "batch_size=6144", "--slice", "v4-64", "--slice", "v4-8", "--json")
    told = json.loads(command(*asked, exit_code=80))["plans"]  # one of them does not fit
    assert [one["hours"] for one in told] == [roomy.hours, None]
    assert told[1]["proposal"]["hours"] == tight.proposal.hours
    with pytest.raises(tinypod.UserError, match="needs slice=\"local\", not 'v4-8'"):
        tinypod.plan(RECIPE, slice="v4-8", measure=True)


def test_the_device_at_hand_is_planned_for(data: Path) -> None:
    planned = tinypod.plan(RECIPE, TINY, data={"path": data})
    assert planned.fits
    assert planned.probe is not None
    assert re.match(r"8 × cpu: fits, needs .*iB of .* per device, .* per step, .* for 10 steps", str(planned))


def test_puzzles_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make(train_size: int) -> Path:
        return tinypod.make_sudoku(tmp_path / "a", box=(2, 2), clues=6, train_size=train_size, test_size=3)

    folder = make(5)
    made = (folder / "dataset.json").read_bytes()
    sizes = ("--box", "2x2", "--clues", 6, "--train-size", 5, "--test-size", 3)
    command("data", "sudoku", tmp_path / "b", "--generate", *sizes)
    assert made == (tmp_path / "b" / "dataset.json").read_bytes()
    capsys.readouterr()
    assert make(5) == folder
    assert "there already" in capsys.readouterr().out
    with pytest.raises(tinypod.UserError, match="already holds a dataset"):
        make(6)
    for _ in range(2):
        tinypod.make_sudoku(tmp_path / "c", box=(2, 2), clues=(6, 8), train_size=5, test_size=3)
    assert "c: the puzzles are there already" in capsys.readouterr().out
    assert "clues 6-8" in (tmp_path / "c" / "dataset.json").read_text()


def test_puzzles_are_made_once_with_their_variants_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make(**changes: int) -> Path:
        asked = {"train_size": 5, "test_size": 3, "variants": 4} | changes
        return tinypod.make_sudoku(tmp_path / "a", box=(2, 2), clues=6, **asked)

    made = json.loads((make() / "dataset.json").read_text())
    assert made["splits"]["train"]["rows"] > 5
    assert "there already" not in capsys.readouterr().out
    make()
    assert "there already" in capsys.readouterr().out
    for other in ({"variants": 3}, {"variants": 0}, {"train_size": 6}):
        with pytest.raises(tinypod.UserError, match="already holds a dataset"):
            make(**other)
    for wrong in ({"variants": -1}, {"train_size": 0}, {"test_size": 0}, {"holdout": -1}):
        name, value = next(iter(wrong.items()))
        with pytest.raises(tinypod.UserError, match=f"{name}={value}: expected"):
            make(**wrong)


def test_an_interrupt_saves_and_the_next_call_resumes(data: Path, tmp_path: Path) -> None:
    def train(steps: int) -> tinypod.Model:
        return tinypod.train(RECIPE, TINY, run=tmp_path, data={"path": data}, steps=steps, eval={"every_steps": None})

    def interrupt() -> None:
        while not over.wait(0.05):
            if (tmp_path / "metrics.jsonl").exists():
                os.kill(os.getpid(), signal.SIGINT)
                return

    over, before = threading.Event(), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    other = threading.Thread(target=interrupt)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt, match=r"stopped at step [\d,]+, with a checkpoint") as raised:
            train(10**6)
    finally:
        over.set()
        other.join()
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    step = int(re.search(r"step ([\d,]+)", str(raised.value))[1].replace(",", ""))
    assert tinypod.load(tmp_path, checkpoint="latest").step == step
    rows = train(step + 1).metrics
    assert rows[0]["step"] == 2  # of the first call
    assert rows[-1]["step"] == step + 1


def test_an_interrupt_before_the_first_step_claims_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = training.Outcome(None, 0, signal.SIGINT)
    monkeypatch.setattr(training, "train", lambda *_, **__: stopped)
    with pytest.raises(KeyboardInterrupt, match="stopped before its first step; call it again"):
        tinypod.train(RECIPE)


def test_a_thread_may_train(data: Path, tmp_path: Path) -> None:
    """Some notebooks run cells in one; Python lets it install no handlers."""
    done: list[tinypod.Model] = []
    keys = {"run": tmp_path / "run", "data": {"path": data}, "steps": 2}
    thread = threading.Thread(target=lambda: done.append(tinypod.train(RECIPE, TINY, **keys)))
    thread.start()
    thread.join()
    assert done[0].step == 2


@pytest.mark.slow
def test_a_type_checker_knows_what_comes_back(tmp_path: Path) -> None:
    assert (Path(tinypod.__file__).parent / "py.typed").exists()
    checked = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-warn-unused-configs"]
    program = """
from typing import assert_type
import tinypod

model = tinypod.train("demo", {"optimizer.learning_rate": 1e-3}, steps=300)
assert_type(model, tinypod.Model)
assert_type(tinypod.load("runs/demo", checkpoint="latest").solve("1...").answer, str)
assert_type(model.evaluate(limit=10), dict[str, float])
assert_type(model.metrics, list[dict[str, float]])
assert_type(tinypod.plan("demo", slice="v4-64").hours, float | None)
"""
    (tmp_path / "program.py").write_text(program + "tinypod.unknown\ntinypod.load(3)\n")
    done = subprocess.run([*checked, str(tmp_path / "program.py")], cwd=ROOT, capture_output=True, text=True)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines() if "error:" in line]
    assert len(lines) == 2, done.stdout + done.stderr
    assert 'Module has no attribute "unknown"' in lines[0]
    assert 'Argument 1 to "load" has incompatible type "int"' in lines[1]


def test_the_documentation_names_everything() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    functions = {name: getattr(tinypod, name) for name in tinypod.__all__ if name[0].islower()}
    methods = {name: getattr(tinypod.Model, name) for name in vars(tinypod.Model) if name[0] != "_"}
    assert {"train", "load", "plan", "make_sudoku"} == functions.keys()
    for name, member in {**functions, **methods}.items():
        assert member.__doc__, name
        assert f"`{name}" in text or f".{name}" in text, name
    for function in functions.values():
        for parameter in set(inspect.signature(function).parameters) - {"keys"}:
            assert re.search(rf"\b{parameter}\b", text), parameter
