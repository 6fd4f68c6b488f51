"""A board to fill in: what puzzles of a run look like, one as text, and the steps of its answer as plain values.

Text has one character a cell, row by row. Sudokus are as everywhere (`.` blank); of other puzzles nothing is known but
their tokens, so a cell is its token's number, in digits and then letters. Text is never taken for the name of a file.
"""

import math
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinypod.data import puzzles, sudoku
from tinypod.errors import DataError, UserError
from tinypod.experiment import Experiment, ExperimentConfig
from tinypod.models import trm
from tinypod.solve.display import Refinement, verdict
from tinypod.solve.refine import make_program, refine
from tinypod.tasks.puzzle import PuzzleTaskConfig, described, open_data

TOKENS = string.digits + string.ascii_lowercase


@dataclass(frozen=True)
class Board:
    rows: int
    columns: int
    symbols: str  # by value; the first is a blank
    box: sudoku.Box | None  # of a Sudoku


def open_board(config: ExperimentConfig, dataset: Any) -> Board:
    """What a run's puzzles look like: by what it remembers of its dataset, or by the dataset itself. Needs no weights,
    and starts no device."""
    if not isinstance(config.task, PuzzleTaskConfig):
        raise UserError(f"a board is for puzzles; this run's task is of kind {config.task.kind!r}")
    info = described(dataset) if dataset else open_data(config, True, None).info
    if info.kind == "sudoku" and info.box is not None:
        box = (info.box[0], info.box[1])
        side = sudoku.side_of(box)
        return Board(side, side, sudoku.SYMBOLS[: side + 1], box)
    if info.num_identifiers > 1 or info.vocab_size > len(TOKENS):
        raise UserError(
            f"a board shows puzzles of one kind with at most {len(TOKENS)} tokens; this dataset has "
            f"{info.num_identifiers:,} kinds and {info.vocab_size} tokens"
        )
    side = math.isqrt(info.seq_len)
    rows = side if side**2 == info.seq_len else 1
    return Board(rows, info.seq_len // rows, TOKENS[: info.vocab_size], None)


def read_example(config: ExperimentConfig, number: int) -> str:
    """A held-out puzzle as text; numbers go round."""
    board, opened = open_board(config, None), open_data(config, False, None)
    split = puzzles.read_split(opened.folder, opened.info, config.data.eval_split)
    tokens = split.inputs[number % len(split)]
    return "".join(board.symbols[value] for value in (sudoku.to_digits(tokens) if board.box else tokens))


def parse(text: str, board: Board) -> np.ndarray:
    """Values uint8 [S]."""
    if board.box is not None:
        return sudoku.parse_puzzle(text, board.box)
    text, cells = "".join(text.split()), board.rows * board.columns
    if len(text) != cells:
        raise DataError(f"puzzle has {len(text)} characters, expected {cells} ({board.rows} rows of {board.columns})")
    if strange := sorted(set(text) - set(board.symbols)):
        raise DataError(f"puzzle has {strange[0]!r}, expected characters of {board.symbols}")
    return np.array([board.symbols.index(character) for character in text], np.uint8)


def make_answer(experiment: Experiment) -> Callable[[trm.Params, str], dict[str, Any]]:
    """(weights, text) -> the steps of the answer; compiles once."""
    board, program = open_board(experiment.config, experiment.task.dataset), make_program(experiment)

    def answer(params: trm.Params, text: str) -> dict[str, Any]:
        question = parse(text, board)
        if board.box is None:
            answers, halting, _ = refine(program, params, question[None])
            return _steps(board, question, answers[:, 0], halting[:, 0])
        answers, halting, _ = refine(program, params, sudoku.to_tokens(question[None]))
        refined = Refinement(question, sudoku.to_digits(answers[:, 0]), halting[:, 0], board.box)
        found = _steps(board, question, refined.grids, refined.halt_probabilities)
        for step, broken, solved in zip(found["steps"], refined.broken, refined.solved_steps, strict=True):
            step |= {"broken": np.flatnonzero(broken).tolist(), "solved": bool(solved)}
        return found | {"verdict": verdict(refined)}

    return answer


def _steps(board: Board, question: np.ndarray, grids: np.ndarray, halting: np.ndarray) -> dict[str, Any]:
    """`solved` is None where nothing here knows the rules."""
    steps: list[dict[str, Any]] = [
        {"cells": _text(board, grid), "confidence": float(sure), "broken": [], "solved": None}
        for grid, sure in zip(grids, halting, strict=True)
    ]
    stops = np.flatnonzero(halting > 0.5)
    return {
        "puzzle": _text(board, question),
        "steps": steps,
        "stops_at": int(stops[0]) + 1 if len(stops) else None,
        "verdict": None,
    }


def _text(board: Board, values: np.ndarray) -> str:
    return "".join(board.symbols[value] if value < len(board.symbols) else "?" for value in values)
