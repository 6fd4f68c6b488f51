"""Variants of puzzles: with the same answer and no other, as hard, and nothing that is held out among them."""

import io
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from tinypod.cli import app
from tinypod.data import build, sudoku, sudoku_generator, sudoku_solver, sudoku_variants
from tinypod.data.puzzles import read_info, read_split
from tinypod.data.sudoku import Puzzles, signatures

HARD = "..19......3..7..8...6...4..5.....34..4..3...8.....972.6..3......7..2.8....51.7..."
NONE = np.zeros(0, np.uint64)


def as_puzzles(questions):
    solved = sudoku_solver.solve_batch(questions)
    return Puzzles(questions, solved.solutions, ["a"] * len(questions), solved.guesses)


@pytest.fixture(scope="module")
def few():
    """A hard puzzle, a minimal one that was made up, and one with clues to spare."""
    wanted = [(3, None), (4, (32, 32))]  # of another seed each: one seed fills one grid
    made = [sudoku_generator.generate((3, 3), 1, seed=seed, clues=clues).questions[0] for seed, clues in wanted]
    return as_puzzles(np.stack([sudoku.parse_puzzle(HARD), *made]))


@pytest.fixture(scope="module")
def variants(few):
    return sudoku_variants.make_variants(few, (3, 3), 6, 0, NONE)


def test_each_has_the_answer_of_its_puzzle_and_no_other(few, variants):
    solved = sudoku_solver.solve_batch(variants.questions)
    assert (solved.counts == 1).all()
    np.testing.assert_array_equal(solved.solutions, variants.answers)
    np.testing.assert_array_equal(solved.guesses, variants.ratings)
    assert {bytes(answer) for answer in variants.answers} == {bytes(answer) for answer in few.answers}
    assert set(variants.sources) == {"a_variant"}


def test_each_is_half_as_hard_or_more_and_has_no_fewer_clues(few, variants):
    clues = (few.questions > 0).sum(1)
    for row in range(3):
        own = (variants.answers == few.answers[row]).all(1)
        assert 1 <= own.sum() <= 6
        assert (2 * variants.ratings[own] >= few.ratings[row]).all()
        assert ((variants.questions[own] > 0).sum(1) >= clues[row]).all()
    assert few.ratings[0] > 20  # so that half of it says something
    assert (variants.answers == few.answers[2]).all(1).sum() == 6  # one with clues to spare has many


def test_no_two_are_copies_nor_one_and_what_is_known(few, variants):
    known = signatures(variants.questions)
    assert len(set(known.tolist())) == len(known)
    assert not np.isin(known, signatures(few.questions)).any()
    left = sudoku_variants.make_variants(few, (3, 3), 6, 0, known[::2])
    assert set(signatures(left.questions).tolist()) == set(known.tolist()) - set(known[::2].tolist())


def test_those_of_a_puzzle_do_not_depend_on_the_puzzles_beside_it(few, variants):
    alone = sudoku_variants.make_variants(as_puzzles(few.questions[1:2]), (3, 3), 6, 0, NONE)
    of_all = variants.questions[(variants.answers == few.answers[1]).all(1)]
    np.testing.assert_array_equal(alone.questions, of_all)
    other = sudoku_variants.make_variants(as_puzzles(few.questions[1:2]), (3, 3), 6, 1, NONE)
    assert not np.array_equal(alone.questions, other.questions)


SHOW = """
import hashlib, numpy as np
from tinypod.data import sudoku_generator, sudoku_variants
made = sudoku_generator.generate((2, 3), 5, seed=0)
found = sudoku_variants.make_variants(made, (2, 3), 4, 7, np.zeros(0, np.uint64))
print([hashlib.sha256(x.tobytes()).hexdigest() for x in (found.questions, found.ratings)], len(found.questions))
"""


def test_plain_python_makes_the_same(capsys):
    exec(SHOW, {})
    code = "import sys; sys.modules['numba'] = None\n" + SHOW
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told == capsys.readouterr().out
    assert int(told.split()[-1]) > 5


def test_the_command_keeps_held_out_puzzles_out(tmp_path, monkeypatch):
    asked = {}

    def make(puzzles, box, most, seed, avoid, progress):
        asked.update(puzzles=puzzles, most=most, avoid=avoid)
        return Puzzles(*(column[:0] for column in puzzles))

    monkeypatch.setattr(sudoku_variants, "make_variants", make)
    sizes = ["--train-size", "6", "--test-size", "5", "--holdout", "4", "--variants", "3"]
    app(["data", "sudoku", str(tmp_path / "d"), "--generate", "--box", "2x3", *sizes], standalone_mode=False)
    info = read_info(tmp_path / "d")
    splits = {name: sudoku.to_digits(read_split(tmp_path / "d", info, name).inputs) for name in info.splits}
    unseen = np.concatenate([splits["test"], splits["holdout"]])
    assert set(asked["avoid"].tolist()) == set(signatures(unseen, (2, 3)).tolist())
    assert {bytes(row) for row in asked["puzzles"].questions} == {bytes(row) for row in splits["train"]}
    assert asked["most"] == 3


def test_any_seed_will_do(few):
    huge = sudoku_variants.make_variants(as_puzzles(few.questions[1:2]), (3, 3), 2, 2**64 + 1, NONE)
    small = sudoku_variants.make_variants(as_puzzles(few.questions[1:2]), (3, 3), 2, 1, NONE)
    np.testing.assert_array_equal(huge.questions, small.questions)


def test_a_dataset_has_them_in_its_training_split_alone(tmp_path):
    sizes = {"train_size": 6, "test_size": 5, "holdout": 4}
    options = {"train_csv": None, "test_csv": None, "generate": True, "box": (2, 3), "clues": None, "seed": 0, **sizes}

    def make(name, variants):
        console = Console(file=io.StringIO())
        info = build.build_sudoku(tmp_path / name, **options, variants=variants, console=console)
        return info, {split: read_split(tmp_path / name, info, split) for split in info.splits}

    (plain, before), (info, after) = make("plain", 0), make("more", 3)
    for split in ("test", "holdout"):
        np.testing.assert_array_equal(before[split].inputs, after[split].inputs)
    trained = {bytes(row) for row in after["train"].inputs}
    assert {bytes(row) for row in before["train"].inputs} < trained
    number = len(after["train"]) - 6
    assert 6 <= number <= 18
    assert info.origin == f"{plain.origin}; {number} variants of them, at most 3 each"
    grids = sudoku.to_digits(after["train"].inputs)
    unseen = np.concatenate([sudoku.to_digits(after[split].inputs) for split in ("test", "holdout")])
    marks = signatures(grids, (2, 3))
    assert len(set(marks.tolist())) == len(grids)
    assert not np.isin(marks, signatures(unseen, (2, 3))).any()
    names = np.array(info.sources)[after["train"].sources]
    assert (names == "generated_variant").sum() == number
