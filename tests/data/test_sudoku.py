"""The solver against a plain Python one, the generator, signatures against brute force, and bad files."""

import io
import itertools
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tinypod.data import build, sudoku, sudoku_csv, sudoku_generator, sudoku_solver
from tinypod.data.puzzles import read_split
from tinypod.errors import DataError

BOXES = [(2, 2), (2, 3), (3, 3)]
HARD = "..19......3..7..8...6...4..5.....34..4..3...8.....972.6..3......7..2.8....51.7..."
HARD_ANSWER = "821964537934571682756283419598712346247635198163849725612358974379426851485197263"


def peers_of(cell, box):
    side, (row, column) = box[0] * box[1], divmod(cell, box[0] * box[1])
    for other in range(side * side):
        r, c = divmod(other, side)
        same_box = (r // box[0], c // box[1]) == (row // box[0], column // box[1])
        if other != cell and (r == row or c == column or same_box):
            yield other


def plain_solutions(puzzle, box, limit=2):
    """All solutions up to a limit by nothing but candidates and backtracking."""
    side = box[0] * box[1]
    peers = [list(peers_of(cell, box)) for cell in range(side * side)]
    grid, found = [int(value) for value in puzzle], []

    def search():
        best = None
        for cell in range(len(grid)):
            if grid[cell] == 0:
                options = set(range(1, side + 1)) - {grid[p] for p in peers[cell]}
                if best is None or len(options) < len(best[1]):
                    best = cell, options
                    if len(options) < 2:
                        break
        if best is None:
            found.append(list(grid))
            return
        for value in best[1]:
            grid[best[0]] = value
            search()
            if len(found) >= limit:
                break
        grid[best[0]] = 0

    if all(grid[c] == 0 or all(grid[p] != grid[c] for p in peers[c]) for c in range(len(grid))):
        search()
    return found


def random_symmetry(grid, box, rng):
    """A random copy of uint8 [S] by every symmetry that boxes of this shape have."""
    (rows, columns), side = box, box[0] * box[1]
    grid = np.concatenate([[0], 1 + rng.permutation(side)])[grid].reshape(side, side)
    down = [band * rows + r for band in rng.permutation(side // rows) for r in rng.permutation(rows)]
    across = [stack * columns + c for stack in rng.permutation(side // columns) for c in rng.permutation(columns)]
    grid = grid[down][:, across]
    if rows == columns and rng.random() < 0.5:
        grid = grid.T
    return grid.reshape(-1).astype(np.uint8)


# The solver


def solve(puzzle, box=(3, 3), limit=2):
    counts, solutions, guesses = sudoku_solver.solve_batch(puzzle[None], box, limit)
    return counts[0], solutions[0], guesses[0]


@settings(deadline=None, max_examples=60)
@given(box=st.sampled_from(BOXES), seed=st.integers(0, 10_000), data=st.data())
def test_solver_counts_as_the_plain_one_does(box, seed, data):
    """On puzzles with one clue taken away, added or changed: none, one or several solutions."""
    questions, _, _ = sudoku_solver.generate_batch(box, seed, 0, 1)
    puzzle = questions[0]
    side = box[0] * box[1]
    for _ in range(data.draw(st.integers(0, 2))):
        puzzle[data.draw(st.integers(0, side * side - 1))] = data.draw(st.integers(0, side))
    expected = plain_solutions(puzzle, box)
    count, solution, _ = solve(puzzle, box)
    assert count == len(expected)
    if count == 1:
        assert solution.tolist() == expected[0]
    elif count == 2:
        assert plain_solutions(solution, box) == [solution.tolist()]
        assert not ((puzzle != 0) & (solution != puzzle)).any()
    else:
        assert not solution.any()


def test_solver_counts_every_grid():
    assert solve(np.zeros(16, np.uint8), (2, 2), limit=1000)[0] == 288


def test_solver_solves_a_hard_puzzle_and_sixteen_rows():
    count, solution, guesses = solve(sudoku.parse_puzzle(HARD))
    assert (count, sudoku.format_puzzle(solution)) == (1, HARD_ANSWER)
    assert guesses > 10
    count, solution, _ = solve(np.zeros(256, np.uint8), (4, 4), limit=1)
    assert count == 1
    assert set(solution.tolist()) == set(range(1, 17))
    assert not sudoku.breaks_rules(solution, (4, 4)).any()


# The generator


@pytest.mark.parametrize(("box", "count"), [((2, 2), 20), ((2, 3), 20), ((3, 3), 4)])
def test_generated_puzzles_are_unique_and_minimal(box, count):
    puzzles = sudoku_generator.generate(box, count, seed=3)
    assert puzzles.questions.shape == puzzles.answers.shape == (count, (box[0] * box[1]) ** 2)
    assert puzzles.questions.dtype == puzzles.answers.dtype == np.uint8
    assert puzzles.ratings.dtype == np.int32
    assert puzzles.sources == ["generated"] * count
    for question, answer in zip(puzzles.questions, puzzles.answers, strict=True):
        assert plain_solutions(question, box) == [answer.tolist()]
        for cell in np.flatnonzero(question):
            fewer = question.copy()
            fewer[cell] = 0
            assert len(plain_solutions(fewer, box)) == 2
    assert len(set(sudoku.signatures(puzzles.questions, box).tolist())) == count


def test_many_generated_puzzles_are_minimal():
    questions = sudoku_generator.generate((3, 3), 300, seed=8).questions
    for cell in range(81):
        clue = questions[:, cell] > 0
        fewer = questions[clue]
        fewer[:, cell] = 0
        assert (sudoku_solver.solve_batch(fewer).counts == 2).all()


def test_generated_puzzles_have_the_clues_asked_for():
    puzzles = sudoku_generator.generate((3, 3), 20, seed=5, clues=(40, 40))
    clues = (puzzles.questions > 0).sum(1)
    assert (clues == 40).all()  # no minimal 9 x 9 puzzle known has more
    assert not ((puzzles.questions != 0) & (puzzles.questions != puzzles.answers)).any()
    minimal = sudoku_generator.generate((3, 3), 20, seed=5)
    np.testing.assert_array_equal(minimal.answers, puzzles.answers)
    assert ((minimal.questions == 0) | (minimal.questions == puzzles.questions)).all()


def test_clues_of_a_range_are_each_as_likely_and_are_the_sources():
    puzzles = sudoku_generator.generate((2, 3), 600, seed=3, clues=(16, 20))
    clues = (puzzles.questions > 0).sum(1)
    assert puzzles.sources == [f"{number}_clues" for number in clues]
    counts = np.bincount(clues)
    assert counts[:16].sum() == 0
    assert len(counts) == 21  # no minimal 6 x 6 puzzle has more
    assert abs(counts[16:] - 120).max() < 5 * np.sqrt(600 * 0.2 * 0.8)  # 5 sigma
    fewest = sudoku_generator.generate((2, 3), 600, seed=3, clues=(16, 16))
    np.testing.assert_array_equal(fewest.answers, puzzles.answers)
    assert ((fewest.questions == 0) | (fewest.questions == puzzles.questions)).all()  # the same puzzles, and more given


def test_no_puzzle_has_more_clues_than_a_range(monkeypatch):
    puzzles = sudoku_generator.generate((3, 3), 20, seed=0, clues=(20, 23))
    assert set((puzzles.questions > 0).sum(1)) <= {20, 21, 22, 23}
    monkeypatch.setattr(sudoku_generator, "PATIENCE", 50)
    with pytest.raises(DataError, match="50 attempts in a row gave symmetric copies, too many clues or"):
        sudoku_generator.generate((3, 3), 1, seed=0, clues=(17, 18))


def test_generation_depends_on_seed_and_attempt_only():
    few, many = sudoku_generator.generate((3, 3), 7, seed=11), sudoku_generator.generate((3, 3), 300, seed=11)
    for a, b in zip(few, many, strict=True):
        assert list(map(str, a)) == list(map(str, b[:7]))
    other = sudoku_generator.generate((3, 3), 7, seed=12)
    assert not set(map(bytes, few.answers)) & set(map(bytes, other.answers))
    all_small = sudoku_generator.generate((2, 2), 36, seed=11).questions
    for count in (1, 12, 30):  # with many copies left out, and so in several batches
        np.testing.assert_array_equal(sudoku_generator.generate((2, 2), count, seed=11).questions, all_small[:count])
    whole = sudoku_solver.generate_batch((3, 3), 11, 0, 8)
    tail = sudoku_solver.generate_batch((3, 3), 11, 5, 3)
    for a, b in zip(whole, tail, strict=True):
        np.testing.assert_array_equal(a[5:], b)


def rectangles(answer):
    """Two rows and two columns that hold two digits crosswise: how many, no symmetry changes."""
    grid, pairs = answer.reshape(9, 9), list(itertools.combinations(range(9), 2))
    return sum(
        grid[r, c] == grid[s, d] and grid[r, d] == grid[s, c] for (r, s), (c, d) in itertools.product(pairs, pairs)
    )


def test_answers_are_not_copies_of_one_grid():
    answers = sudoku_generator.generate((3, 3), 300, seed=0).answers
    assert len(set(map(rectangles, answers[:30]))) > 8
    frequency = np.stack([(answers == digit).mean(0) for digit in range(1, 10)])
    assert abs(frequency - 1 / 9).max() < 5 * np.sqrt(8 / 81 / 300)  # 5 sigma of a uniform digit


def test_four_by_four_has_36_minimal_puzzles():
    """A known count: 13 with four clues, 22 with five, one with six. So no copy, no merge, and an end."""
    puzzles = sudoku_generator.generate((2, 2), 36, seed=0)
    assert np.bincount((puzzles.questions > 0).sum(1)).tolist() == [0, 0, 0, 0, 13, 22, 1]
    with pytest.raises(DataError, match="found 36 of 37 different 4x4"):
        sudoku_generator.generate((2, 2), 37, seed=0)


def test_patience_is_for_attempts_in_a_row(monkeypatch):
    monkeypatch.setattr(sudoku_generator, "PATIENCE", 30)
    assert len(sudoku_generator.generate((2, 2), 34, seed=0).sources) == 34  # 78 copies on the way, never 30 in a row
    with pytest.raises(DataError, match="30 attempts in a row"):
        sudoku_generator.generate((2, 2), 36, seed=0)


def test_generation_reports_progress_and_refuses_nonsense():
    done = []
    sudoku_generator.generate((2, 3), 300, seed=0, progress=done.append)
    assert sum(done) == 300
    assert len(done) > 1
    for box, count, clues in [
        ((3, 3), 0, None),
        ((3, 3), 1, (82, 82)),
        ((3, 3), 1, (30, 29)),
        ((4, 5), 1, None),
        ((4, 4), 1, None),
    ]:
        with pytest.raises(DataError, match="expected"):
            sudoku_generator.generate(box, count, seed=0, clues=clues)


# Signatures


@settings(deadline=None, max_examples=100)
@given(box=st.sampled_from([*BOXES, (3, 2), (1, 5)]), seed=st.integers(0, 10_000), clues=st.integers(0, 12))
def test_signatures_of_symmetric_copies_agree(box, seed, clues):
    question = sudoku_solver.generate_batch(box, seed, 0, 1, (clues, clues))[0][0]
    copy = random_symmetry(question, box, np.random.default_rng(seed))
    a, b = sudoku.signatures(np.stack([question, copy]), box)
    assert a == b


def canonical_4x4(grid):
    """The smallest of all 128 views of a 4 x 4 grid, digits renamed in order of appearance."""
    halves = [(0, 1), (1, 0)]
    lines = [[2 * b + i for b, h in zip(bands, (p, q), strict=True) for i in h]
             for bands, p, q in itertools.product(halves, halves, halves)]  # fmt: skip
    views = []
    for rows, columns in itertools.product(lines, lines):
        view = grid.reshape(4, 4)[rows][:, columns]
        for cells in (view.reshape(-1).tolist(), view.T.reshape(-1).tolist()):
            names = {0: 0}
            views.append(tuple(names.setdefault(value, len(names)) for value in cells))
    return min(views)


def test_signatures_against_canonical_forms():
    questions = np.concatenate(
        [sudoku_solver.generate_batch((2, 2), 7, 0, 150, (clues, clues))[0] for clues in (0, 6, 8)]
    )
    canonical = [canonical_4x4(question) for question in questions]
    by_form, by_signature = {}, {}
    for form, signature in zip(canonical, sudoku.signatures(questions, (2, 2)).tolist(), strict=True):
        by_form.setdefault(form, set()).add(signature)
        by_signature.setdefault(signature, set()).add(form)
    assert len(by_form) > 100
    assert all(len(found) == 1 for found in by_form.values())
    assert len(by_signature) >= 0.99 * len(by_form)


def test_signatures_tell_other_puzzles_apart():
    questions = sudoku_solver.generate_batch((3, 3), 1, 0, 300)[0]
    assert len(np.unique(sudoku.signatures(questions))) == 300
    moved = questions.copy()  # one clue goes elsewhere in its row
    for puzzle in moved:
        clue = np.flatnonzero(puzzle)[0]
        blank = clue // 9 * 9 + np.flatnonzero(puzzle.reshape(9, 9)[clue // 9] == 0)[-1]
        puzzle[blank], puzzle[clue] = puzzle[clue], 0
    assert (sudoku.signatures(moved) != sudoku.signatures(questions)).mean() > 0.99


def test_signatures_tell_rows_from_columns_unless_boxes_are_square():
    grid = np.zeros((6, 6), np.uint8)
    grid[0, 0], grid[0, 1] = 1, 2
    a, b = sudoku.signatures(np.stack([grid.reshape(-1), grid.T.reshape(-1)]), (2, 3))
    assert a != b
    assert sudoku.signatures(np.zeros((0, 81), np.uint8)).shape == (0,)
    assert sudoku.signatures(np.zeros((2, 81), np.uint8)).dtype == np.uint64


# Files


def write(path: Path, rows: list[str], header="source,question,answer,rating") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def rows_of(puzzles):
    return [
        f"{source},{sudoku.format_puzzle(q)},{sudoku.format_puzzle(a)},{rating}"
        for q, a, source, rating in zip(*puzzles[:3], puzzles.ratings, strict=True)
    ]


@pytest.fixture(scope="module")
def puzzles():
    return sudoku_generator.generate((2, 3), 20, seed=0)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_csv_round_trip(tmp_path, puzzles, monkeypatch, chunk):
    monkeypatch.setattr(sudoku_csv, "CHUNK_ROWS", chunk)
    path, done = write(tmp_path / "p.csv", rows_of(puzzles)), []
    read = sudoku_csv.read_csv(path, (2, 3), progress=done.append)
    for a, b in zip(read, puzzles, strict=True):
        np.testing.assert_array_equal(a, b)
    assert read.questions.dtype == read.answers.dtype == np.uint8
    assert read.ratings.dtype == np.int32
    assert sum(done) == 20


def test_csv_columns_may_move_be_more_or_be_missing(tmp_path):
    zeros = HARD.replace(".", "0")
    path = write(tmp_path / "mine.csv", [f'x,{HARD_ANSWER},"{zeros}"'], "note,answer,question")
    read = sudoku_csv.read_csv(path)
    assert (sudoku.format_puzzle(read.questions[0]), read.sources, read.ratings.tolist()) == (
        HARD,
        ["mine"],
        [0],
    )
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert len(sudoku_csv.read_csv(path).sources) == 1


@pytest.mark.parametrize("chunk", [4, 1000])
def test_subsampling(tmp_path, puzzles, monkeypatch, chunk):
    monkeypatch.setattr(sudoku_csv, "CHUNK_ROWS", chunk)
    named = puzzles._replace(sources=[f"s{i}" for i in range(20)])
    path = write(tmp_path / "p.csv", rows_of(named))
    read = sudoku_csv.read_csv(path, (2, 3), subsample=8, seed=4)
    rows = [int(name[1:]) for name in read.sources]
    assert rows == sorted(np.random.default_rng(4).choice(20, 8, replace=False).tolist())
    np.testing.assert_array_equal(read.questions, puzzles.questions[rows])
    np.testing.assert_array_equal(read.answers, puzzles.answers[rows])
    np.testing.assert_array_equal(read.ratings, puzzles.ratings[rows])
    assert sudoku_csv.read_csv(path, (2, 3), subsample=8, seed=5).sources != read.sources
    assert sudoku_csv.read_csv(path, (2, 3), subsample=20).sources == named.sources
    for size in (21, 0):
        with pytest.raises(DataError, match=rf"p\.csv: asked for {size} rows, expected .* 20"):
            sudoku_csv.read_csv(path, (2, 3), subsample=size)


def two_solutions(question):
    """A minimal puzzle without its first clue."""
    clue = next(i for i, c in enumerate(question) if c != ".")
    return question[:clue] + "." + question[clue + 1 :]


def swapped(answer, question):
    """The answer with two neighbours, blank in the question, exchanged: their columns then repeat a digit."""
    i = next(i for i in range(35) if i % 6 < 5 and question[i : i + 2] == "..")
    return answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]


BAD = {
    "short question": (lambda s, q, a, r: f"{s},{q[:-1]},{a},{r}", "question has 35 characters, expected 36"),
    "long answer": (lambda s, q, a, r: f"{s},{q},{a}1,{r}", "answer has 37 characters, expected 36"),
    "alien character": (
        lambda s, q, a, r: f"{s},{q[:7]}x{q[8:]},{a},{r}",
        "question has 'x' at row 2, column 2",
    ),
    "accent": (lambda s, q, a, r: f"{s},é{q[1:]},{a},{r}", "question has 'é' at row 1, column 1"),
    "digit too large": (lambda s, q, a, r: f"{s},{q},7{a[1:]},{r}", "answer has '7' at row 1, column 1"),
    "blank in answer": (lambda s, q, a, r: f"{s},{q},{a[:-1]}.,{r}", "answer has '.' at row 6, column 6"),
    "other answer": (
        lambda s, q, a, r: f"{s},{q},{a.translate(str.maketrans('123456', '234561'))},{r}",
        "expected the question's digit",
    ),
    "not a grid": (lambda s, q, a, r: f"{s},{q},{swapped(a, q)},{r}", "answer has a digit twice"),
    "rating": (lambda s, q, a, r: f"{s},{q},{a},hard", "rating is 'hard', expected a number"),
    "infinite rating": (lambda s, q, a, r: f"{s},{q},{a},inf", "rating is 'inf', expected a number"),
    "fields": (lambda s, q, a, r: f"{s},{q},{a}", "3 fields, expected 4"),
    "more fields": (lambda s, q, a, r: f"{s},{q},{a},{r},5", "5 fields, expected 4"),
    "quote": (lambda s, q, a, r: f'{s},"{q}"x,{a},{r}', "not a row of CSV"),
    "two solutions": (lambda s, q, a, r: f"{s},{two_solutions(q)},{a},{r}", "more than one solution"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("chunk", [4, 1000])
def test_bad_rows_are_named_by_line(tmp_path, puzzles, monkeypatch, kind, chunk):
    monkeypatch.setattr(sudoku_csv, "CHUNK_ROWS", chunk)
    spoil, message = BAD[kind]
    rows = rows_of(puzzles)
    for row in (6, 9, 15):
        rows[row] = spoil(*rows[row].split(","))
    rows.insert(3, "")  # blank lines are no rows, but they are lines
    with pytest.raises(DataError) as caught:
        sudoku_csv.read_csv(write(tmp_path / "p.csv", rows), (2, 3))
    assert f"{tmp_path / 'p.csv'}:9: " in str(caught.value)
    assert message in str(caught.value)
    assert "expected" in str(caught.value)


def test_cheap_checks_see_every_row_and_proofs_only_those_kept(tmp_path, puzzles):
    rows = rows_of(puzzles)
    kept = set(np.random.default_rng(0).choice(20, 5, replace=False).tolist())
    out, inside = min(set(range(20)) - kept), min(kept)

    def read(row, kind):
        spoilt = [*rows[:row], BAD[kind][0](*rows[row].split(",")), *rows[row + 1 :]]
        return sudoku_csv.read_csv(write(tmp_path / "p.csv", spoilt), (2, 3), subsample=5)

    assert len(read(out, "two solutions").sources) == 5
    with pytest.raises(DataError, match=rf"p\.csv:{inside + 2}: .*more than one"):
        read(inside, "two solutions")
    with pytest.raises(DataError, match=rf"p\.csv:{out + 2}: answer has a digit twice"):
        read(out, "not a grid")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1: found an empty file, expected a header"),
        (b"\n\n", ":1: found an empty file"),
        (b"source,puzzle,answer\n", ":1: found columns source, puzzle, answer, expected"),
        (b"question,answer\n\n", "no rows"),
        (
            b"question,answer\n" + f"{HARD},{HARD_ANSWER}\n{HARD},{HARD_ANSWER[:40]}".encode(),
            ":3: answer has 40",
        ),
        (b"question,answer\n" + f"{HARD},{HARD_ANSWER}\n{HARD[:40]}".encode(), ":3: 1 fields, expected 2"),
        (b"question,answer\n" + f"{HARD},{HARD_ANSWER}\n{HARD},\xff".encode("latin-1"), ":3: not UTF-8"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", ":1: not UTF-8"),
        (b"question,answer\n" + f'{HARD},"{HARD_ANSWER}\n'.encode(), "not a row of CSV"),
        (b"question,answer\n" + f"{HARD},{HARD_ANSWER}\0\n".encode(), ":2: "),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "p.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        sudoku_csv.read_csv(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.csv: cannot be read"):
        sudoku_csv.read_csv(tmp_path / "nothing.csv")
    with pytest.raises(DataError, match="cannot be read"):
        sudoku_csv.read_csv(tmp_path)


# Rules and text


@settings(deadline=None, max_examples=60)
@given(box=st.sampled_from(BOXES), seed=st.integers(0, 10_000))
def test_breaks_rules_as_the_definition_says(box, seed):
    side = box[0] * box[1]
    grids = np.random.default_rng(seed).integers(0, side + 1, (2, 3, side * side)).astype(np.uint8)
    broken = sudoku.breaks_rules(grids, box)
    assert broken.shape == grids.shape
    for grid, marks in zip(grids.reshape(6, -1), broken.reshape(6, -1), strict=True):
        expected = [v != 0 and any(grid[p] == v for p in peers_of(c, box)) for c, v in enumerate(grid)]
        assert marks.tolist() == expected


@settings(deadline=None, max_examples=30)
@given(box=st.sampled_from([*BOXES, (3, 4)]), seed=st.integers(0, 1000))
def test_parse_reads_what_format_writes(box, seed):
    side = box[0] * box[1]
    row = np.random.default_rng(seed).permutation(side) + 1
    grid = np.zeros((side, side), np.uint8)
    grid[seed % side] = row * (row > side // 3)
    text = sudoku.format_puzzle(grid)
    lines = "\n".join(" ".join(text[i : i + side]) for i in range(0, side * side, side))
    for written in (text, text.replace(".", "0"), f"\n{lines}\n"):
        parsed = sudoku.parse_puzzle(written, box)
        assert parsed.dtype == np.uint8
        np.testing.assert_array_equal(parsed, grid.reshape(-1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HARD[:-1], "puzzle has 80 characters, expected 81"),
        ("", "puzzle has 0 characters"),
        (HARD[:10] + "x" + HARD[11:], "'x' at row 2, column 2, expected `.` or `0` for blank and 1-9"),
        ("." * 72 + "...5...5.", "5 at row 9, column 4 and again in the same row, column or box"),
        ("." * 10 + "7" + "." * 8 + "." + "7" + "." * 60, "7 at row 2, column 2 and again"),
    ],
)
def test_parse_errors(text, message):
    with pytest.raises(DataError) as caught:
        sudoku.parse_puzzle(text)
    assert message in str(caught.value)


def test_parse_knows_the_letters_of_its_side():
    assert sudoku.parse_puzzle("C" + "." * 143, (3, 4))[0] == 12
    with pytest.raises(DataError, match=r"'D' at row 1, column 1, expected .* 1-9, A-C"):
        sudoku.parse_puzzle("D" + "." * 143, (3, 4))
    with pytest.raises(DataError, match=r"'5' at row 1, column 1, expected .* 1-4"):
        sudoku.parse_puzzle("5" + "." * 15, (2, 2))


# What may be absent


def in_plain_python(code: str) -> str:
    """What a process without numba prints."""
    code = "import sys; sys.modules['numba'] = None\n" + code
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


SHOW = """
import hashlib
from tinypod.data import sudoku_generator, sudoku_solver
for box, count, clues in [((1, 2), 1, None), ((2, 2), 20, None), ((2, 3), 60, (20, 25)), ((3, 3), 3, None)]:
    made = sudoku_generator.generate(box, count, seed=2**64 - 5, clues=clues)
    fewer = made.questions.copy()
    fewer[:, :3] = 0
    arrays = made.questions, made.answers, made.ratings, *sudoku_solver.solve_batch(fewer, box, limit=5)
    print([(str(x.dtype), x.shape, hashlib.sha256(x.tobytes()).hexdigest()) for x in arrays])
"""


def test_plain_python_makes_and_proves_the_same(capsys):
    assert sudoku_solver.COMPILED
    exec(SHOW, {})
    told = in_plain_python(SHOW + "assert not sudoku_solver.COMPILED")
    assert told == capsys.readouterr().out


def test_without_numba_small_grids_work_and_large_ones_are_slow_with_a_warning(tmp_path):
    told = in_plain_python(f"""
import warnings
warnings.simplefilter("error")
from tinypod.cli import app
for box, sizes in (("2x3", (40, 20)), ("3x3", (2, 1))):
    flags = ["--generate", "--box", box, "--train-size", str(sizes[0]), "--test-size", str(sizes[1])]
    app(["data", "sudoku", f"{tmp_path}/{{box}}", *flags], standalone_mode=False)
""")
    assert "40 train, 20 test" in told
    assert "2 train, 1 test" in told
    assert told.count("pip install 'tinypod[sudoku]'") == 1
    assert told.index("40 train") < told.index("pip install")


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path, puzzles):
    names = []
    for name in ("train", "test"):
        (tmp_path / f"[{name}").mkdir()
        names.append(write(tmp_path / f"[{name}" / "b] [red {x.csv", rows_of(puzzles)))
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    out = tmp_path / "[" / "out] [bold"
    options = {"generate": False, "train_size": 5, "test_size": 5, "box": (2, 3), "clues": None, "seed": 0}
    info = build.build_sudoku(out, train_csv=names[0], test_csv=names[1], **options, console=console)
    build.describe(out, info, console)
    said = " ".join(console.file.getvalue().split())  # broken between words, as the console is narrow
    assert f"{out}: sudoku puzzles of 36 cells (5 train, 5 test)" in said


@pytest.mark.parametrize("generate", [False, True])
def test_a_holdout_is_of_the_training_file_and_changes_no_other_split(tmp_path, puzzles, generate):
    csvs = {} if generate else {f"{name}_csv": write(tmp_path / name, rows_of(puzzles)) for name in ("train", "test")}
    options = {"train_csv": None, "test_csv": None, "clues": (12, 12) if generate else None} | csvs

    def make(name, seed, holdout=4):
        console = Console(file=io.StringIO())
        sizes = {"train_size": 5, "holdout": holdout, "test_size": 3}
        info = build.build_sudoku(
            tmp_path / name, generate=generate, box=(2, 3), seed=seed, console=console, **sizes, **options
        )
        splits = {split: read_split(tmp_path / name, info, split) for split in info.splits}
        return {split: {bytes(row) for row in rows.inputs} for split, rows in splits.items()}

    made = make("a", 0)
    assert {split: len(rows) for split, rows in made.items()} == {"train": 5, "test": 3, "holdout": 4}
    assert not made["train"] & made["holdout"]
    assert make("b", 0) == made
    assert make("c", 1)["holdout"] != made["holdout"]
    assert make("d", 0, holdout=0) == {split: made[split] for split in ("train", "test")}
    if not generate:
        assert made["train"] | made["holdout"] <= {bytes(row) for row in sudoku.to_tokens(puzzles.questions)}
        with pytest.raises(DataError, match=r"asked for 18 rows besides 5 for training, and it has 20; take fewer"):
            make("e", 0, holdout=18)


def test_numba_is_imported_late():
    code = "import sys; from tinypod.data import build, sudoku_csv; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_download(monkeypatch):
    calls = []

    def fetch(repo, name, repo_type):
        calls.append((repo, name, repo_type))
        return f"cache/{name}"

    def fail(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=fetch))
    assert sudoku_csv.download() == (Path("cache/train.csv"), Path("cache/test.csv"))
    assert calls[0] == ("sapientinc/sudoku-extreme", "train.csv", "dataset")
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=fail))
    with pytest.raises(DataError, match=r"no route.*pass local CSV files, or generate"):
        sudoku_csv.download()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"pip install 'tinypod\[hub\]'"):
        sudoku_csv.download()
