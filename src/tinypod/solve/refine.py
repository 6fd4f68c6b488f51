"""Puzzles of a user or of the held-out split, refined step by step by a trained model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tinypod import sharding
from tinypod.data import puzzles, sudoku
from tinypod.data.views import SUDOKU_FIRST_DIGIT
from tinypod.errors import DataError, UserError
from tinypod.experiment import Experiment
from tinypod.models import trm
from tinypod.solve.display import Refinement
from tinypod.tasks.puzzle import PuzzleTaskConfig, open_data
from tinypod.tasks.puzzle_scores import TABLE

HELD_OUT = 200  # held-out puzzles among which the one that took longest to solve is shown
REFINED_AT_ONCE = 256  # puzzles


def refinements(experiment: Experiment, params: trm.Params, puzzle: str | None, number: int | None) -> list[Refinement]:
    """`puzzle` is characters, or a file with one a line; None takes a held-out one: of that number, or a slow one."""
    config = experiment.config
    if not isinstance(config.task, PuzzleTaskConfig):
        raise UserError(f"solve shows puzzles; this run's task is of kind {config.task.kind!r}")
    folder, info = open_data(config, False, None)
    if info.kind != "sudoku" or info.box is None:
        raise UserError(f"solve draws Sudokus; this run's puzzles are of kind {info.kind!r}")
    box = (info.box[0], info.box[1])
    known: np.ndarray | None = None
    if puzzle is not None:
        questions = np.stack(read_puzzles(puzzle, box))
    else:
        split = puzzles.read_split(folder, info, config.data.eval_split)
        if number is not None and number >= len(split):
            raise UserError(f"--number {number}: there are {len(split)} held-out puzzles, numbered from 0")
        rows = slice(HELD_OUT) if number is None else slice(number, number + 1)
        questions, known = to_digits(split.inputs[rows]), to_digits(split.labels[rows])
    answers, halting = refine(experiment, params, to_tokens(questions), config.task.halting.max_steps)
    refined = [
        Refinement(question, to_digits(answers[:, i]), halting[:, i], box, None if known is None else known[i])
        for i, question in enumerate(questions)
    ]
    if puzzle is None and number is None:
        return [max(refined, key=lambda r: (r.solved, r.solved_at or 0))]
    return refined


def refine(
    experiment: Experiment, params: trm.Params, inputs_BS: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """The answer (tokens [steps, B, S]) and the halting probability ([steps, B]) after each step."""
    model = experiment.config.model
    gather = sharding.make_gather(experiment.mesh, experiment.specs)

    def run(params: trm.Params, inputs: Array) -> tuple[Array, Array]:
        table = params.get(TABLE)
        rows = None if table is None else table[jnp.zeros(inputs.shape[0], jnp.int32)]

        def advance(z: trm.Z, _: None) -> tuple[trm.Z, tuple[Array, Array]]:
            z, logits, q = trm.apply(model, params, z, inputs, rows, gather)
            return z, (jnp.argmax(logits, axis=-1), jax.nn.sigmoid(q[:, 0]))

        return jax.lax.scan(advance, trm.initial_z(model, params, *inputs.shape), length=steps)[1]

    compiled, parts = jax.jit(run), range(0, len(inputs_BS), REFINED_AT_ONCE)
    done = [jax.device_get(compiled(params, jnp.asarray(inputs_BS[i : i + REFINED_AT_ONCE], jnp.int32))) for i in parts]
    answers, halting = (np.concatenate(column, axis=1) for column in zip(*done, strict=True))
    return answers, halting


def read_puzzles(text: str, box: tuple[int, int]) -> list[np.ndarray]:
    path = Path(text)
    try:
        is_file = path.is_file()
    except OSError:  # a puzzle is a longer name than some file systems allow
        is_file = False
    if not is_file:
        try:
            return [sudoku.parse_puzzle(text, box)]
        except DataError as error:
            raise DataError(f"{text}: not a file, and not a puzzle: {error}") from None
    parsed = []
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path}: not a text file") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                parsed.append(sudoku.parse_puzzle(line, box))
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}") from None
    if not parsed:
        raise DataError(f"{path}: no puzzles in this file")
    return parsed


def to_digits(tokens: np.ndarray) -> np.ndarray:
    """Tokens to digits; 0 for blank and padding."""
    return np.maximum(tokens.astype(np.int32) - (SUDOKU_FIRST_DIGIT - 1), 0).astype(np.uint8)


def to_tokens(digits: np.ndarray) -> np.ndarray:
    return (digits + (SUDOKU_FIRST_DIGIT - 1)).astype(np.uint8)
