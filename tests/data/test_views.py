"""Augmentation on the device: every view is a valid puzzle with its solution, and draws are what they say."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures import split_4x4
from tinypod.data import views
from tinypod.data.sudoku import FIRST_DIGIT, unit_cells
from tinypod.data.sudoku_generator import generate

BOXES = [(2, 2), (2, 3), (3, 2), (3, 3)]


@pytest.fixture(scope="module", params=BOXES, ids=lambda box: f"{box[0]}x{box[1]}")
def drawn(request: pytest.FixtureRequest):
    """Some puzzles of a box shape as tokens, and their view function, compiled once."""
    box = request.param
    made = generate(box, 8, seed=3)
    view = views.sudoku_view(box, box[0] * box[1] + FIRST_DIGIT)
    return box, made.questions + np.uint8(1), made.answers + np.uint8(1), jax.jit(view)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31 - 1), number=st.integers(0, 7))
def test_every_view_is_a_valid_puzzle_with_its_solution(drawn, seed: int, number: int) -> None:
    box, questions, answers, view = drawn
    tokens, cells = (np.asarray(x) for x in view(jax.random.key(seed)))
    question, answer = tokens[questions[number]][cells], tokens[answers[number]][cells]
    side = box[0] * box[1]
    for units in unit_cells(box):  # rows, columns, boxes
        for unit in units:
            assert sorted(answer[unit]) == list(range(2, side + 2))
    clues = question != 1
    assert np.array_equal(question[clues], answer[clues])
    assert clues.sum() == (questions[number] != 1).sum()
    assert sorted(cells) == list(range(side * side))
    assert tokens[0] == 0
    assert tokens[1] == 1


def test_views_reach_every_symmetry_of_the_4x4() -> None:
    """128 ways to move the cells (8 for rows, 8 for columns, transposed or not), 24 ways to name the digits."""
    view = jax.jit(jax.vmap(views.sudoku_view((2, 2), 6)))
    tokens, cells = view(jax.random.split(jax.random.key(0), 4000))
    assert len({tuple(t) for t in np.asarray(tokens).tolist()}) == 24
    lines = [
        [2 * b + i for b, inner in zip(bands, inners, strict=True) for i in inner]
        for bands in itertools.permutations(range(2))
        for inners in itertools.product(itertools.permutations(range(2)), repeat=2)
    ]
    grids = [np.add.outer(4 * np.array(r), np.array(c)) for r in lines for c in lines]
    expected = {tuple(g.reshape(-1).tolist()) for grid in grids for g in (grid, grid.T)}
    assert len(expected) == 128
    assert {tuple(c) for c in np.asarray(cells).tolist()} == expected


def draw(sampler: views.Sampler, arrays, seed: int, count: int = 512, views_seed: int = 7):
    keys = jax.random.key(seed), jax.random.key(views_seed)
    return jax.jit(lambda a, k, v: views.draw_examples(sampler, a, k, v, count))(arrays, *keys)


def test_fixed_views_are_limited_and_the_same_in_every_draw() -> None:
    split = split_4x4(3)
    arrays = views.device_arrays(split)
    sampler = views.Sampler(views.sudoku_view((2, 2), 6), augmentations=5, grouped=False)
    seen = [{tuple(row) for row in np.asarray(draw(sampler, arrays, seed)["inputs"]).tolist()} for seed in (1, 2)]
    assert seen[0] == seen[1]
    assert 3 < len(seen[0]) <= 3 * 6
    assert {tuple(row) for row in split.inputs.tolist()} <= seen[0]  # a puzzle itself is one of its views
    endless = views.Sampler(sampler.view, augmentations=None, grouped=False)
    assert len({tuple(row) for row in np.asarray(draw(endless, arrays, 1)["inputs"]).tolist()}) > 100
    other = draw(sampler, arrays, 1, views_seed=8)["inputs"]
    assert {tuple(row) for row in np.asarray(other).tolist()} != seen[0]


def test_no_augmentation_draws_the_rows_themselves_evenly() -> None:
    split = split_4x4(4)
    sampler = views.Sampler(views.sudoku_view((2, 2), 6), augmentations=0, grouped=False)
    inputs = np.asarray(draw(sampler, views.device_arrays(split), 0, 4000)["inputs"])
    counts = [int((inputs == row).all(axis=1).sum()) for row in split.inputs]
    assert sum(counts) == 4000
    assert min(counts) > 850  # 1 000 expected, sd 27


def test_unlabelled_cells_are_marked() -> None:
    split = split_4x4(2)
    split.labels[:, 3] = 0
    sampler = views.Sampler(None, augmentations=None, grouped=False)
    labels = np.asarray(draw(sampler, views.device_arrays(split), 0, 8)["labels"])
    assert (labels[:, 3] == views.IGNORED_LABEL).all()
    assert (np.delete(labels, 3, axis=1) >= 2).all()


def test_groups_are_drawn_by_weight_and_evenly_inside() -> None:
    arrays = {
        "inputs": jnp.arange(10, dtype=jnp.uint8)[:, None],
        "labels": jnp.ones((10, 1), jnp.uint8),
        "identifiers": jnp.arange(10),
        "group_offsets": jnp.array([0, 2, 10]),
        "group_cdf": jnp.array([0.75, 1.0]),
    }
    sampler = views.Sampler(None, None, grouped=True)
    ids = np.asarray(draw(sampler, arrays, 0, 8000)["identifiers"])
    counts = np.bincount(ids, minlength=10)
    assert counts[:2].min() > 2800  # 3 000 expected each
    assert counts[2:].min() > 180  # 250 expected each
