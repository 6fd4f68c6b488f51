"""Augmentation on the device: every view is a valid puzzle with its solution, and draws are what they say."""

import dataclasses
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
    return jax.jit(lambda a, k, v: views.draw_examples(sampler, a, jnp.int32(0), k, v, count))(arrays, *keys)


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


def test_fixed_views_begin_with_the_puzzle_itself_and_are_undone() -> None:
    three, five = (views.fixed_views(views.sudoku_view((2, 3), 8), count) for count in (3, 5))
    assert np.array_equal(five.tokens[:3], three.tokens)
    assert np.array_equal(five.cells[:3], three.cells)
    assert len({np.asarray(cells).tobytes() for cells in five.cells}) == 5
    grids = jax.random.randint(jax.random.key(1), (4, 36), 0, 8).astype(jnp.uint8)
    seen = five.apply(grids)
    assert np.array_equal(seen[:, 0], grids)
    for number in range(5):
        tokens, cells = np.asarray(five.tokens[number]), np.asarray(five.cells[number])
        assert np.array_equal(seen[:, number], tokens[np.asarray(grids)][:, cells])
        assert tokens[:2].tolist() == [0, 1]  # padding and blanks stay what they are
    back = five.undo(seen.astype(jnp.uint8)[None], axis=2)
    assert np.array_equal(back, np.broadcast_to(grids[None, :, None], back.shape))


def test_some_blank_cells_are_given_besides(drawn) -> None:
    _, questions, answers, _ = drawn
    inputs, labels = (jnp.asarray(np.repeat(x, 500, axis=0), jnp.int32) for x in (questions, answers))
    found = np.asarray(jax.jit(views.reveal_cells, static_argnums=3)(jax.random.key(0), inputs, labels, 4))
    given = found != inputs
    assert np.array_equal(found[given], np.asarray(labels)[given])  # right ones,
    assert (np.asarray(inputs)[given] < FIRST_DIGIT).all()  # where there was none
    numbers = np.bincount(given.sum(axis=1))
    assert len(numbers) == 5
    assert abs(numbers - 800).max() < 5 * np.sqrt(4000 * 0.2 * 0.8)  # 5 sigma of each number as likely
    blank = np.asarray(inputs)[0] < FIRST_DIGIT
    assert (given[:500].sum(axis=0)[blank] > 0).all()  # any of them
    more = np.asarray(views.reveal_cells(jax.random.key(0), inputs[:1], labels[:1], 1000))
    assert np.array_equal(more, labels[:1])


def test_a_batch_with_cells_given_is_the_same_batch_otherwise() -> None:
    arrays = views.device_arrays(split_4x4(20, 1))
    plain = views.Sampler(views.sudoku_view((2, 2), 6), None, grouped=False)
    drawn = [
        views.draw_examples(sampler, arrays, jnp.int32(0), jax.random.key(1), jax.random.key(2), 64)
        for sampler in (plain, dataclasses.replace(plain, reveal=5))
    ]
    assert np.array_equal(drawn[0]["labels"], drawn[1]["labels"])
    changed = np.asarray(drawn[0]["inputs"] != drawn[1]["inputs"])
    assert 0 < changed.sum() < changed.size / 2
    assert (np.asarray(drawn[0]["inputs"])[changed] == 1).all()


@pytest.mark.parametrize(("rows", "count"), [(10, 4), (10, 10), (7, 16), (5, 1), (6, 12)])
def test_epochs_offer_every_row_once_before_any_comes_again(rows: int, count: int) -> None:
    batch = jax.jit(lambda key, number: views.epoch_rows(key, number, rows, count))
    numbers = range(5 * rows)
    offered = np.concatenate([batch(jax.random.key(3), jnp.int32(number)) for number in numbers])
    epochs = offered[: len(offered) // rows * rows].reshape(-1, rows)
    assert np.array_equal(np.sort(epochs, axis=1), np.broadcast_to(np.arange(rows), epochs.shape))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 4  # each in an order of its own
    assert not np.array_equal(batch(jax.random.key(4), jnp.int32(0)), offered[:count]) or count == 1


def test_epochs_count_to_their_limit() -> None:
    """Past what an int32 holds; the last batch that steps × batch_size allow."""
    rows, count = 1000, 768
    number = views.MOST_EXAMPLES // count - 1
    found = views.epoch_rows(jax.random.key(0), jnp.int32(number), rows, count)
    epoch, offset = divmod(number * count, rows)
    order = jax.random.permutation(jax.random.fold_in(jax.random.key(0), epoch), rows)
    first = np.asarray(order)[offset:][:count]
    assert np.array_equal(found[: len(first)], first)


def test_a_sampler_of_epochs_draws_by_the_number_of_the_batch() -> None:
    arrays = views.device_arrays(split_4x4(12, 1)) | {"identifiers": np.arange(12, dtype=np.int32)}
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    sampler = views.Sampler(views.sudoku_view((2, 2), 6), None, grouped=False, epochs=True)
    run_key = jax.random.key(1)
    draw = jax.jit(lambda number, key: views.draw_examples(sampler, arrays, number, key, run_key, 6))
    halves = [draw(jnp.int32(number), jax.random.key(number)) for number in range(2)]
    assert sorted(np.concatenate([half["identifiers"] for half in halves]).tolist()) == list(range(12))
    again = draw(jnp.int32(1), jax.random.key(7))  # another key: the same puzzles, seen otherwise
    assert np.array_equal(again["identifiers"], halves[1]["identifiers"])
    assert not np.array_equal(again["inputs"], halves[1]["inputs"])
