"""Puzzles of a user or of the held-out split, refined step by step by a trained model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tinypod import sharding
from tinypod.data import puzzles, sudoku
from tinypod.errors import DataError, UserError
from tinypod.experiment import Experiment
from tinypod.models import trm
from tinypod.solve import picture
from tinypod.solve.display import Refinement
from tinypod.tasks.puzzle import PuzzleTaskConfig, described, make_thinking, open_data
from tinypod.tasks.puzzle_thinking import stop_logit

HELD_OUT = 200  # puzzles among which one is chosen that shows much; a large model takes its time for more
REFINED_AT_ONCE = 256  # puzzles, or views and trajectories of them


class Program(NamedTuple):
    run: Callable[[trm.Params, Array], tuple[Array, Array, Array]]  # (params, inputs [B, S]) -> as `refine`
    at_once: int  # puzzles


class Answer(Refinement):
    """A refinement that a notebook shows as a picture."""

    def _repr_svg_(self) -> str:
        return picture.draw_svg(self)


def refinements(
    experiment: Experiment,
    params: trm.Params,
    puzzle: str | Sequence[str] | None = None,
    number: int | None = None,
    *,
    limit: int | None = HELD_OUT,
    program: Program | None = None,
) -> list[Answer]:
    """`puzzle` is characters, a file with one a line, or a list of them; None takes held-out ones: that of a number, or
    the first. `program`: the experiment's, where the caller has it compiled."""
    config = experiment.config
    if not isinstance(config.task, PuzzleTaskConfig):
        raise UserError(f"solve shows puzzles; this run's task is of kind {config.task.kind!r}")
    info = described(experiment.task.dataset)
    if info.kind != "sudoku" or info.box is None:
        raise UserError(f"solve draws Sudokus; this run's puzzles are of kind {info.kind!r}")
    box = (info.box[0], info.box[1])
    if puzzle is not None:
        questions = np.stack(read_puzzles(puzzle, box))
    else:
        split = puzzles.read_split(*open_data(config, False, None), config.data.eval_split)
        if number is not None and number >= len(split):
            raise UserError(f"--number {number}: there are {len(split)} held-out puzzles, numbered from 0")
        questions = sudoku.to_digits(split.inputs[:limit] if number is None else split.inputs[number : number + 1])
    answers, halting, cost = refine(program or make_program(experiment), params, sudoku.to_tokens(questions))
    grids = sudoku.to_digits(answers)
    return [Answer(question, grids[:, i], halting[:, i], box, int(cost[i])) for i, question in enumerate(questions)]


def make_program(experiment: Experiment, steps: int = 0) -> Program:
    """Compiled once for each number of puzzles. `steps`: default the config's task.halting.max_steps."""
    placement, config = sharding.place(experiment.mesh, experiment.specs), experiment.config
    think = make_thinking(config.task, config.model, described(experiment.task.dataset), placement, steps)

    @jax.jit
    def run(params: trm.Params, inputs: Array) -> tuple[Array, Array, Array]:
        answers, q, cost = think(params, inputs, jnp.zeros(inputs.shape[0], jnp.int32))
        return answers, jax.nn.sigmoid(stop_logit(q, continues=config.task.continue_loss)), cost

    return Program(run, max(REFINED_AT_ONCE // config.task.thinking.chains, 1))


def refine(program: Program, params: trm.Params, inputs_BS: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The answer (tokens [steps, B, S]) and the halting probability ([steps, B]) after each step, and how many steps of
    the model each took ([B])."""
    parts = [inputs_BS[i : i + program.at_once] for i in range(0, len(inputs_BS), program.at_once)]
    done = [jax.device_get(program.run(params, jnp.asarray(part, jnp.int32))) for part in parts]
    answers, halting, cost = zip(*done, strict=True)
    return np.concatenate(answers, axis=1), np.concatenate(halting, axis=1), np.concatenate(cost)


def read_puzzles(given: str | Sequence[str], box: sudoku.Box) -> list[np.ndarray]:
    """From the file of that name, one a line; the text itself; or a list of such texts."""
    parsed = []
    for where, line in _lines(given) if isinstance(given, str) else _listed(given):
        try:
            parsed.append(sudoku.parse_puzzle(line, box))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    return parsed


def _lines(text: str) -> list[tuple[str, str]]:
    """(where, puzzle) for each."""
    try:
        lines = Path(text).read_text().splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{text}: not a text file") from None
    except OSError:  # no such file; or a puzzle is a longer name than the file system allows
        return [(f"{text}: not a file, and not a puzzle", text)]
    named = [(f"{text}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not named:
        raise DataError(f"{text}: no puzzles in this file")
    return named


def _listed(texts: Sequence[str]) -> list[tuple[str, str]]:
    if not texts:
        raise DataError("no puzzles to solve: the list is empty")
    return [(f"{text!r}" if len(texts) == 1 else f"[{n}] {text!r}", text) for n, text in enumerate(texts)]
