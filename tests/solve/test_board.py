"""Boards of puzzles that nobody here knows the rules of."""

from pathlib import Path

import jax
import numpy as np
import pytest

from fixtures import tiny_config
from tinypod.data import puzzles
from tinypod.errors import DataError, UserError
from tinypod.experiment import build
from tinypod.solve.board import make_answer, open_board, read_example


def write_maze(folder: Path, cells: int = 9, **changes: int) -> Path:
    tokens = np.random.default_rng(0).integers(1, 6, (8, cells)).astype(np.uint8)
    numbers = {"identifiers": np.int32, "sources": np.uint16, "ratings": np.int32}
    split = puzzles.Split(tokens, tokens, **{name: np.zeros(8, kind) for name, kind in numbers.items()})
    fields = {"kind": "plain", "seq_len": cells, "vocab_size": 6, "num_identifiers": 1} | changes
    info = puzzles.DatasetInfo(**fields, sources=["s"], origin="test")
    puzzles.write_dataset(folder, info, {"train": split, "test": split})
    return folder


def test_a_plain_puzzle_is_a_grid_of_tokens(tmp_path: Path) -> None:
    config = tiny_config(write_maze(tmp_path / "data"), "data.augmentations=0")
    board = open_board(config, None)
    assert (board.rows, board.columns, board.symbols, board.box) == (3, 3, "012345", None)
    text = read_example(config, 9)  # of eight: the second
    split = puzzles.read_split(tmp_path / "data", puzzles.read_info(tmp_path / "data"), "test")
    assert text == "".join(map(str, split.inputs[1]))
    experiment = build(config)
    answer = make_answer(experiment)
    params = experiment.task.init_params(jax.random.key(0))
    found = answer(params, text)
    assert found["puzzle"] == text
    assert [len(step["cells"]) for step in found["steps"]] == [9, 9, 9]
    assert {step["solved"] for step in found["steps"]} == {None}
    for wrong, says in (("123", "3 characters, expected 9"), ("99999999x", "'9'")):
        with pytest.raises(DataError, match=says):
            answer(params, wrong)


def test_what_is_no_square_is_one_row(tmp_path: Path) -> None:
    board = open_board(tiny_config(write_maze(tmp_path / "data", cells=6), "data.augmentations=0"), None)
    assert (board.rows, board.columns) == (1, 6)


def test_puzzles_of_many_kinds_have_no_board(tmp_path: Path) -> None:
    config = tiny_config(write_maze(tmp_path / "data", num_identifiers=3), "data.augmentations=0")
    with pytest.raises(UserError, match="3 kinds"):
        open_board(config, None)
