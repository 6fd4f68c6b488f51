"""Puzzles for a release that has none of its own."""

from pathlib import Path

import pytest

from fixtures import info_4x4
from tinypod.data import puzzles
from tinypod.data.sudoku import parse_puzzle
from tinypod.data.sudoku_solver import solve_batch
from tinypod.errors import DataError
from tinypod.runs.release import About, Release
from tinypod.solve.examples import example


def release_of(info: puzzles.DatasetInfo, *examples: str) -> Release:
    facts = {"tinypod": "0", "config": {}, "num_weights": 1, "step": 1, "weights": "ema"}
    return Release(Path("a.safetensors"), About(**facts, dataset=info.model_dump(mode="json"), examples=examples))


@pytest.mark.parametrize("box", [(2, 2), (3, 3)])
def test_a_made_up_puzzle_has_one_solution_and_is_always_the_same(box: tuple[int, int]) -> None:
    release = release_of(puzzles.describe_sudoku(list(box), sources=[], origin="test"))
    text = example(release, 0)
    assert example(release, 0) == text != example(release, 1)
    solved = solve_batch(parse_puzzle(text, box)[None], box)
    assert solved.counts.tolist() == [1]
    assert box == (2, 2) or solved.guesses[0] >= 10  # a hard one


def test_its_own_examples_go_first() -> None:
    release = release_of(info_4x4(), "1" + "." * 15, "2" + "." * 15)
    assert [example(release, number)[0] for number in (0, 1)] == ["1", "2"]


def test_a_board_too_large_to_make_puzzles_for() -> None:
    with pytest.raises(DataError, match="side 16: expected at most 12"):
        example(release_of(puzzles.describe_sudoku([4, 4], sources=[], origin="test")), 0)
