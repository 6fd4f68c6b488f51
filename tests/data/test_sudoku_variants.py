"""Variants of puzzles: with one answer, as hard, and nothing that is held out among them."""

import ast
import contextlib
import io
import itertools
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
FEW_CLUES = "4.8.............7...14......9...2..................8.1.5.....2..7.68.......1..6.4"
NONE = np.zeros(0, np.uint64)


def as_puzzles(questions):
    solved = sudoku_solver.solve_batch(questions)
    return Puzzles(questions, solved.solutions, ["a"] * len(questions), solved.guesses)


def singles(candidates, box=(3, 3)):
    """Sets of digits by cell, after naked and hidden singles; None where they contradict each other."""
    units = sudoku.unit_cells(box).reshape(-1, box[0] * box[1]).tolist()
    candidates, before = [set(digits) for digits in candidates], None
    while candidates != before:
        before = [set(digits) for digits in candidates]
        for unit in units:
            for cell in unit:
                for other in unit:
                    if len(candidates[cell]) == 1 and other != cell:
                        candidates[other] -= candidates[cell]
            for digit in range(1, box[0] * box[1] + 1):
                places = [cell for cell in unit if digit in candidates[cell]]
                if not places:
                    return None
                if len(places) == 1:
                    candidates[places[0]] = {digit}
    return candidates


def open_after_trials(question, box=(3, 3)):
    """The same as the solver's, slowly, on sets."""
    digits = range(1, box[0] * box[1] + 1)
    candidates, before = singles([{digit} if digit else set(digits) for digit in question.tolist()], box), None
    while candidates != before:
        before = candidates
        for cell in range(len(question)):
            for digit in before[cell]:
                tried = [{digit} if other == cell else left for other, left in enumerate(candidates)]
                if len(candidates[cell]) > 1 and digit in candidates[cell] and singles(tried, box) is None:
                    less = [left - {digit} if other == cell else left for other, left in enumerate(candidates)]
                    candidates = singles(less, box)
    return sum(len(left) > 1 for left in candidates)


@pytest.fixture(scope="module")
def few():
    """A hard puzzle, a minimal one that was made up, and one with clues to spare."""
    wanted = [(3, None), (4, (32, 32))]  # of another seed each: one seed fills one grid
    made = [sudoku_generator.generate((3, 3), 1, seed=seed, clues=clues).questions[0] for seed, clues in wanted]
    return as_puzzles(np.stack([sudoku.parse_puzzle(HARD), *made]))


def alone(puzzles, row, most=6, seed=0):
    """The variants of one of them."""
    return sudoku_variants.make_variants(
        Puzzles(*(column[row : row + 1] for column in puzzles)), (3, 3), most, seed, NONE
    )


@pytest.fixture(scope="module")
def variants(few):
    return sudoku_variants.make_variants(few, (3, 3), 6, 0, NONE)


def test_each_has_one_answer_and_it_is_given(few, variants):
    solved = sudoku_solver.solve_batch(variants.questions)
    assert (solved.counts == 1).all()
    np.testing.assert_array_equal(solved.solutions, variants.answers)
    np.testing.assert_array_equal(solved.guesses, variants.ratings)
    assert set(variants.sources) == {"a_variant"}
    others = {bytes(answer) for answer in variants.answers} - {bytes(answer) for answer in few.answers}
    assert len(others) > 6  # other clues alone would leave three answers


def test_cells_left_open_when_every_digit_was_tried(few):
    questions = np.concatenate([few.questions, sudoku_generator.generate((3, 3), 4, seed=5).questions])
    assert sudoku_solver.open_after_trials(questions).tolist() == [
        open_after_trials(question) for question in questions
    ]
    assert sudoku_solver.open_after_trials(few.questions).tolist() == [57, 0, 0]


@pytest.mark.parametrize("seed", [0, 1])
def test_each_is_about_as_hard_and_has_no_fewer_clues(few, seed):
    """With the second seed, the walk from the hard one comes to puzzles that guess as often and that trials solve."""
    clues = (few.questions > 0).sum(1)
    for row in range(3):
        own = alone(few, row, seed=seed)
        assert 1 <= len(own.questions) <= 6
        assert (2 * own.ratings >= few.ratings[row]).all()
        assert ((own.questions > 0).sum(1) >= clues[row]).all()
        assert (
            10 * sudoku_solver.open_after_trials(own.questions).min()
            >= 9 * sudoku_solver.open_after_trials(few.questions)[row]
        )
    assert few.ratings[0] > 20  # so that half of it says something
    assert len(own.questions) == 6  # one with clues to spare has many


def test_more_of_them_begin_with_those_of_fewer(few):
    longer, shorter = (alone(few, 0, most=most).questions for most in (12, 5))
    np.testing.assert_array_equal(longer[:5], shorter)
    assert len(longer) > 8


def test_one_or_two_clues_are_exchanged_at_a_time(few):
    walk = np.concatenate([few.questions[:1], sudoku_solver.wander(few.questions[0], (3, 3), 0, 40, 400)[0]])
    lost = [
        min(((other > 0) & (other != puzzle)).sum() for other in walk[:row]) for row, puzzle in enumerate(walk[1:], 1)
    ]
    assert max(lost) == 2
    shared = ((walk == walk[0]) & (walk > 0)).sum(1)
    assert (shared[1:] < shared[0]).all()  # none is the first with a cell given
    assert shared.min() < shared[0] - 4  # and they get away from it
    first = np.concatenate([sudoku_solver.wander(few.questions[0], (3, 3), seed, 4, 1)[0] for seed in range(40)])
    assert len(first) > 20  # with one clue taken and two given also, one of which may be the same
    assert ((first == walk[0]) & (walk[0] > 0)).sum(1).max() < shared[0]


def test_every_puzzle_that_two_exchanged_clues_make_is_found():
    start = sudoku_generator.generate((2, 2), 1, seed=0).questions[0]
    clues = np.flatnonzero(start)
    wanted = set()
    for taken in itertools.combinations(clues, 2):
        rest = start.copy()
        rest[list(taken)] = 0
        tried = []
        for cells in itertools.combinations(np.flatnonzero(rest == 0), 2):
            for digits in itertools.product(range(1, 5), repeat=2):
                tried.append(rest.copy())
                tried[-1][list(cells)] = digits
        tried = np.array(tried)
        wanted |= {bytes(puzzle) for puzzle in tried[sudoku_solver.solve_batch(tried, (2, 2)).counts == 1]}
    wanted -= {bytes(start)}
    found = {bytes(puzzle) for seed in range(6000) for puzzle in sudoku_solver.wander(start, (2, 2), seed, 4, 1)[0]}
    assert found == wanted
    assert len(wanted) > 100


def test_one_with_few_clues_that_leave_too_many_answers_without_two_of_them():
    question = sudoku.parse_puzzle(FEW_CLUES)
    without = question.copy()
    without[np.flatnonzero(question)[[0, 1]]] = 0
    assert sudoku_solver.solve_batch(without[None], limit=8192).counts[0] == 8192
    for seed in (0, 3, 10):  # in the last two, answers are too many without one of them, too
        walk = sudoku_solver.wander(question, (3, 3), seed, 8, 40)[0]
        assert len(walk) == 8
        assert (sudoku_solver.solve_batch(walk).counts == 1).all()


def test_a_walk_does_not_come_back(few):
    walk = sudoku_solver.wander(few.questions[0], (3, 3), 0, 40, 400)[0]
    assert len(walk) > 20
    assert len(sudoku_solver.wander(few.questions[0], (3, 3), 4, 40, 1)[0]) == 4  # of one attempt, to go further
    assert len(np.unique(np.concatenate([few.questions[:1], walk]), axis=0)) == 1 + len(walk)


def test_no_two_are_copies_nor_one_and_what_is_known(few, variants):
    known = signatures(variants.questions)
    assert len(set(known.tolist())) == len(known)
    assert not np.isin(known, signatures(few.questions)).any()
    left = sudoku_variants.make_variants(few, (3, 3), 6, 0, known[::2])
    assert set(signatures(left.questions).tolist()) == set(known.tolist()) - set(known[::2].tolist())


def test_those_of_a_puzzle_do_not_depend_on_the_puzzles_beside_it(few, variants):
    each = [alone(few, row).questions for row in range(3)]
    np.testing.assert_array_equal(np.concatenate(each), variants.questions)
    assert not np.array_equal(each[1], alone(few, 1, seed=1).questions)


def test_what_was_stopped_makes_the_rest_alone(tmp_path, monkeypatch, capsys):
    """Of a file that a kill cut short, all again."""
    made, wander = [], sudoku_solver.wander

    def counted(question, *arguments):
        made.append(bytes(question))
        return wander(question, *arguments)

    def make(out):
        sizes = {"train_size": 6, "test_size": 3, "box": (2, 2), "clues": (6, 6), "seed": 0, "variants": 5}
        return build.build_sudoku(
            out, train_csv=None, test_csv=None, generate=True, **sizes, console=Console(force_terminal=False)
        )

    def stop(console, what, total):
        return contextlib.nullcontext(interrupt if what == "varying" else lambda done: None)

    def interrupt(done):
        raise KeyboardInterrupt

    monkeypatch.setattr(sudoku_solver, "wander", counted)
    straight = make(tmp_path / "straight")
    assert len(set(made)) == len(made) == 6
    assert sorted(path.name for path in (tmp_path / "straight").iterdir()) == ["dataset.json", "test.npz", "train.npz"]

    with monkeypatch.context() as patch:
        patch.setattr(build, "counting", stop)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "stopped")
    kept = sorted((tmp_path / "stopped" / build.VARIANTS).iterdir())
    assert str(tmp_path / "stopped" / build.VARIANTS) in capsys.readouterr().out.replace("\n", "")
    assert kept
    kept[0].write_bytes(kept[0].read_bytes()[:100])
    made.clear()
    assert make(tmp_path / "stopped") == straight
    assert len(made) == 6 - len(kept) + 1
    for name in ("dataset.json", "test.npz", "train.npz"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_what_is_kept_is_of_one_seed_and_number(few, tmp_path):
    asked = [(6, 0), (6, 1), (4, 0)]
    plain = [sudoku_variants.make_variants(few, (3, 3), most, seed, NONE) for most, seed in asked]
    kept = [sudoku_variants.make_variants(few, (3, 3), most, seed, NONE, None, tmp_path) for most, seed in asked * 2]
    assert len(list(tmp_path.iterdir())) == 3 * 3
    for one, other in zip(plain * 2, kept, strict=True):
        np.testing.assert_array_equal(one.questions, other.questions)
        np.testing.assert_array_equal(one.answers, other.answers)
        np.testing.assert_array_equal(one.ratings, other.ratings)


SHOW = """
import hashlib, numpy as np
from tinypod.data import sudoku, sudoku_generator, sudoku_solver, sudoku_variants
made = sudoku_generator.generate((2, 3), 5, seed=0)
found = sudoku_variants.make_variants(made, (2, 3), 4, 7, np.zeros(0, np.uint64))
columns = found.questions, found.answers, found.ratings
print([hashlib.sha256(x.tobytes()).hexdigest() for x in columns], len(found.questions))
hard = sudoku.parse_puzzle("..19......3..7..8...6...4..5.....34..4..3...8.....972.6..3......7..2.8....51.7...")
print([x.tolist() for x in sudoku_solver.wander(hard, (3, 3), 2**63 + 24, 4, 1)])
"""


def test_plain_python_makes_the_same(capsys):
    exec(SHOW, {})
    code = "import sys; sys.modules['numba'] = None\n" + SHOW
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told == capsys.readouterr().out
    first, second = told.splitlines()
    assert int(first.split()[-1]) > 5
    assert len(ast.literal_eval(second)[0]) == 4  # of a hard one, for which every rule is asked


def test_the_command_keeps_held_out_puzzles_out(tmp_path, monkeypatch):
    asked = {}

    def make(puzzles, box, most, seed, avoid, progress, kept):
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
    np.testing.assert_array_equal(alone(few, 1, 2, 2**64 + 1).questions, alone(few, 1, 2, 1).questions)


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
