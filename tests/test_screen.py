"""What a person sees, in real terminals of 80 and of 60 columns, in a pipe, and at Ctrl-C."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fixtures import CONFIGS, TINY, tiny_config, write_4x4
from terminals import PATIENCE_S, Terminal
from tinypod import training
from tinypod.evaluate import Evaluator
from tinypod.runs.folder import Run
from tinypod.runs.saver import Saver

RECIPE = str(CONFIGS / "trm" / "sudoku_mlp.yaml")
# A step that takes long to compile: there is time for Ctrl-C.
LONG_TO_COMPILE = ("model.unroll=true", "model.H_cycles=3", "model.L_cycles=6", "compile_cache=null")
SPINNING = r"[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("screen")
    write_4x4(folder / "data", test=400, num_sources=2)
    return folder


def arguments_of(folder: Path, run: str, *overrides: str) -> list[str]:
    overrides = (*TINY, f"data.path={folder / 'data'}", f"compile_cache={folder / 'compiled'}", *overrides)
    return ["train", RECIPE, *overrides, "--run", str(folder / run)]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Terminal:
    """A whole run at 60 columns."""
    with Terminal(arguments_of(folder, "run", "log.every_steps=1"), 60) as terminal:
        assert terminal.end() == 0, terminal.text
    return terminal


def assert_fits(terminal: Terminal) -> None:
    # A path that is longer than a line stands on one of its own, whole: it can be copied.
    too_long = [line for line in terminal.lines if len(line) > terminal.width and " " in line.strip()]
    assert too_long == []
    assert "…" not in terminal.text


def test_a_run_fits_60_columns(trained: Terminal) -> None:
    assert_fits(trained)
    for whole in ("best checkpoint", "held-out exact", "goodput", "C compiling"):
        assert any(whole in line for line in trained.lines), whole


def test_its_progress_line_says_what_it_does_and_moves(trained: Terminal) -> None:
    compiling = [line for line in trained.lines if re.match(rf"{SPINNING} compiling the step · \d+ s", line)]
    assert len(set(compiling)) > 1
    assert any(re.match(r"step \d+/10 .*loss", line) for line in trained.lines)


def test_its_progress_line_says_what_it_evaluates_and_saves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either may be over before the line is drawn again; here both last until it was."""
    screen = io.StringIO()

    def lasting(function: Any, pattern: str) -> Any:
        def until_shown(*arguments: Any) -> Any:
            found, until = function(*arguments), time.monotonic() + PATIENCE_S
            while not re.search(pattern, screen.getvalue()):
                assert time.monotonic() < until, screen.getvalue()
                time.sleep(0.05)
            return found

        return until_shown

    evaluating = rf"step 5/10 · {SPINNING} evaluating 400/400 · \d+ s"
    saving = rf"step 10/10 · {SPINNING} saving step 10 · \d+ s"
    monkeypatch.setattr(Evaluator, "__call__", lasting(Evaluator.__call__, evaluating))
    monkeypatch.setattr(Saver, "finish", lasting(Saver.finish, saving))
    console = Console(file=screen, force_terminal=True, width=60)
    training.train(tiny_config(folder / "data"), Run(folder / "lasting"), console)


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        (["slices"], ["v5e-256", "16x16", "4090-8", "usable GiB"]),
        (["slices", "v4-64"], ["v4-64", "2x4x4", "devices"]),
        (["runs", "status", "{run}"], ["done: step 10 of 10", "verdict", "checkpoints: 5, 10", "C compiling"]),
        (["train", "{run}"], ["nothing left to do at step 10", "best checkpoint"]),
        (["eval", "{run}"], ["source0", "source1", "puzzles", "exact"]),
        (["train", "{run}/nowhere.yaml"], ["error: "]),
    ],
)
def test_commands_fit(trained: Terminal, folder: Path, arguments: list[str], whole: list[str], width: int) -> None:
    with Terminal([argument.format(run=folder / "run") for argument in arguments], width) as terminal:
        assert terminal.end() in (0, 2), terminal.text
    assert_fits(terminal)
    for text in whole:
        assert any(text in line for line in terminal.lines), (text, terminal.text)


def test_in_a_pipe_there_are_whole_lines_without_control_characters(trained: Terminal, folder: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "tinypod", *arguments_of(folder, "piped", "steps=5")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
    )
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout)
    assert "compiling the step\n" in done.stdout
    assert re.search(r"^step 5/5 · loss [\d.]+ · .*held-out .*", done.stdout, re.MULTILINE)


def test_ctrl_c_is_answered_while_it_compiles_and_a_second_one_ends_it(folder: Path) -> None:
    """At 80 columns."""
    with Terminal(arguments_of(folder, "compiling", *LONG_TO_COMPILE), 80) as terminal:
        terminal.wait_for("compiling the step")
        terminal.interrupt()
        terminal.wait_for("stopping once the compiler is done")
        terminal.wait_for("and loses nothing")
        assert "compiled the step" not in terminal.text
        terminal.interrupt()
        assert terminal.end() == 130
    assert "compiled the step" not in terminal.text
    assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l"), "the cursor is shown again"
    assert_fits(terminal)


def test_ctrl_c_in_a_packed_study_is_answered_while_it_compiles(folder: Path) -> None:
    with Terminal(arguments_of(folder, "study", "seed=0,1", *LONG_TO_COMPILE), 80) as terminal:
        terminal.wait_for("compiling the step of 2 runs")
        terminal.interrupt()
        terminal.wait_for("stopping once the compiler is done")
        assert "compiled the step" not in terminal.text
        terminal.interrupt()
        assert terminal.end() == 130


def test_ctrl_c_in_an_evaluation_says_what_will_be_saved(trained: Terminal, folder: Path) -> None:
    """One that takes long: of single puzzles."""
    slow = ("eval.batch_size=1", "task.halting.max_steps=320")
    with Terminal(arguments_of(folder, "evaluating", *slow), 60) as terminal:
        terminal.wait_for(r"evaluating \d+/400")
        terminal.interrupt()
        terminal.wait_for("stopping in the middle of the evaluation")
        assert terminal.end() == 130
    said = " ".join(terminal.text.split())
    assert "then saving step 5; Ctrl-C again ends at once and loses what came after step 0" in said
    assert (folder / "evaluating" / "checkpoints" / "5").is_dir()
    assert_fits(terminal)
