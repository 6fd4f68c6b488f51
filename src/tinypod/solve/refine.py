"""Puzzles of a user or of the held-out split, refined step by step by a trained model."""

from pathlib import Path

import numpy as np

from tinypod.data import sudoku
from tinypod.data.views import SUDOKU_FIRST_DIGIT
from tinypod.errors import DataError, UserError
from tinypod.evaluate import refine
from tinypod.experiment import Experiment
from tinypod.models.trm import Params
from tinypod.solve.display import Refinement

HELD_OUT = 200  # held-out puzzles among which the one that took longest to solve is shown


def refinements(
    experiment: Experiment, params: Params, puzzle: str | None, number: int | None, halt_steps: int | None
) -> list[Refinement]:
    """`puzzle` is characters, or a file with one a line; None takes a held-out one: of that number, or a slow one."""
    if experiment.info.kind != "sudoku" or experiment.info.box is None:
        raise UserError(f"solve draws Sudokus; this run's puzzles are of kind {experiment.info.kind!r}")
    box = (experiment.info.box[0], experiment.info.box[1])
    known: np.ndarray | None = None
    if puzzle is not None:
        questions = np.stack(read_puzzles(puzzle, box))
    else:
        split = experiment.read_split(experiment.config.data.eval_split)
        if number is not None and number >= len(split):
            raise UserError(f"--number {number}: there are {len(split)} held-out puzzles, numbered from 0")
        rows = slice(HELD_OUT) if number is None else slice(number, number + 1)
        questions, known = to_digits(split.inputs[rows]), to_digits(split.labels[rows])
    steps = halt_steps or experiment.config.task.halting.max_steps
    answers, halting = refine(experiment, params, to_tokens(questions), steps)
    refined = [
        Refinement(question, to_digits(answers[:, i]), halting[:, i], box, None if known is None else known[i])
        for i, question in enumerate(questions)
    ]
    if puzzle is None and number is None:
        return [max(refined, key=lambda r: (r.solved, r.solved_at or 0))]
    return refined


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
