"""Batches made on the device. The base puzzles lie in device memory; each step draws rows and changes them by a random
symmetry, inside the compiled program. A batch is a pure function of the arrays and a key.

Rows are drawn at random, or in epochs: every row once, in an order of its own for each epoch. What is offered is not
what is learned from: under adaptive computation a row of the batch takes a new example only when it has finished.

Blank cells of a Sudoku may be given besides (`reveal`): easier puzzles with the same answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tinypod.data.puzzles import Split
from tinypod.data.sudoku import FIRST_DIGIT, Box

IGNORED_LABEL = -100
REVEAL = 2**32 - 1  # folded into the key of a batch, which is split in few
EPOCHS = 2**32 - 1  # folded into a run's key, in which rows are for their views: no row has this number
MOST_EXAMPLES = 2**32  # that epochs can count

# key -> (token of each token, cell that each cell comes from)
View = Callable[[Array], tuple[Array, Array]]


@dataclass(frozen=True)
class Sampler:
    """How examples are drawn: the symmetries, how many fixed views a puzzle has (None: endless), the order, and how
    many blank cells are given besides at most."""

    view: View | None
    augmentations: int | None
    grouped: bool
    epochs: bool = False
    reveal: int = 0


def sudoku_view(box: Box, vocab_size: int) -> View:
    """Random symmetry of a Sudoku: digits relabelled, bands, stacks and the lines in them permuted, transposed."""
    box_rows, box_cols = box
    side = box_rows * box_cols

    def lines(key: Array, groups: int, size: int) -> Array:
        outer_key, inner_key = jax.random.split(key)
        outer = jnp.argsort(jax.random.uniform(outer_key, (groups,)))
        inner = jnp.argsort(jax.random.uniform(inner_key, (groups, size)), axis=-1)
        return (outer[:, None] * size + inner).reshape(-1)

    def view(key: Array) -> tuple[Array, Array]:
        digit_key, row_key, col_key, turn_key = jax.random.split(key, 4)
        digits = FIRST_DIGIT + jnp.argsort(jax.random.uniform(digit_key, (side,)))
        tokens = jnp.arange(vocab_size).at[FIRST_DIGIT : FIRST_DIGIT + side].set(digits)
        rows, cols = lines(row_key, box_cols, box_rows), lines(col_key, box_rows, box_cols)
        cells = rows[:, None] * side + cols[None, :]
        if box_rows == box_cols:  # else a transposed grid has boxes of another shape
            cells = jnp.where(jax.random.bernoulli(turn_key), cells.T, cells)
        return tokens, cells.reshape(-1)

    return view


class Views(NamedTuple):
    """Symmetries that stay the same: the token of each token [V, vocab], the cell that each cell comes from [V, S]."""

    tokens: Array
    cells: Array

    def apply(self, grids_BS: Array) -> Array:
        """[B, V, S]"""
        return jax.vmap(lambda tokens, cells: tokens[grids_BS][:, cells], out_axes=1)(*self)

    def undo(self, grids: Array, axis: int) -> Array:
        """Grids seen by the views along an axis, as they are to the others; cells are the last dim."""

        def one(tokens: Array, cells: Array, seen: Array) -> Array:
            back = jnp.argsort(tokens).astype(seen.dtype)  # both are permutations
            return back[seen][..., jnp.argsort(cells)]

        return jax.vmap(one, in_axes=(0, 0, axis), out_axes=axis)(self.tokens, self.cells, grids)


def fixed_views(view: View, count: int) -> Views:
    """The first so many of an endless row of symmetries, which begins with the one that changes nothing."""
    tokens, cells = jax.vmap(lambda number: view(jax.random.fold_in(jax.random.key(0), number)))(jnp.arange(count))
    unchanged = (jnp.arange(x.shape[1], dtype=x.dtype) for x in (tokens, cells))
    return Views(*(x.at[0].set(first) for x, first in zip((tokens, cells), unchanged, strict=True)))


def device_arrays(split: Split) -> dict[str, Any]:
    """What `draw_examples` reads, as host arrays ready to be put on the device."""
    arrays: dict[str, Any] = {name: getattr(split, name) for name in ("inputs", "labels", "identifiers")}
    if split.group_offsets is not None and split.group_weights is not None:
        weights = split.group_weights / split.group_weights.sum()
        arrays["group_offsets"] = split.group_offsets.astype(np.int32)
        arrays["group_cdf"] = np.cumsum(weights).astype(np.float32)
    return arrays


def draw_examples(
    sampler: Sampler, arrays: dict[str, Array], number: Array, key: Array, run_key: Array, count: int
) -> dict[str, Array]:
    """The batch of a number, of `count` examples: inputs and labels int32 [count, S] (unlabelled cells -100),
    identifiers [count].

    `key` decides which, `run_key` what the fixed views of each puzzle are and the order of each epoch.
    """
    row_key, view_key = jax.random.split(key)
    if sampler.epochs:
        rows = epoch_rows(jax.random.fold_in(run_key, EPOCHS), number, arrays["inputs"].shape[0], count)
    else:
        rows = _draw_rows(sampler, arrays, row_key, count)
    inputs, labels = arrays["inputs"][rows].astype(jnp.int32), arrays["labels"][rows].astype(jnp.int32)
    if sampler.view is not None and sampler.augmentations != 0:
        inputs, labels = jax.vmap(_change, in_axes=(None, None, 0, 0, 0, 0))(
            sampler, run_key, rows, jax.random.split(view_key, count), inputs, labels
        )
    if sampler.reveal:
        inputs = reveal_cells(jax.random.fold_in(key, REVEAL), inputs, labels, sampler.reveal)
    labels = jnp.where(labels == 0, IGNORED_LABEL, labels)
    return {"inputs": inputs, "labels": labels, "identifiers": arrays["identifiers"][rows]}


def reveal_cells(key: Array, inputs_BS: Array, answers_BS: Array, most: int) -> Array:
    """Each Sudoku with some of its blank cells filled in: a number drawn from 0 to `most`, or all that there are."""
    number_key, order_key = jax.random.split(key)
    numbers_B1 = jax.random.randint(number_key, (inputs_BS.shape[0], 1), 0, most + 1)
    blank_BS = inputs_BS < FIRST_DIGIT
    turns_BS = jnp.where(blank_BS, jax.random.uniform(order_key, inputs_BS.shape), 2.0)
    places_BS = jnp.argsort(jnp.argsort(turns_BS, axis=1), axis=1)  # the blank cells in a random order, then the rest
    return jnp.where(blank_BS & (places_BS < numbers_B1), answers_BS, inputs_BS)


def epoch_rows(key: Array, number: Array, rows: int, count: int) -> Array:
    """The rows of a batch where batches follow each other through epoch after epoch, of which each is a permutation of
    all rows: a function of the batch's number, so that resuming has nothing to replay."""
    start = number.astype(jnp.uint32) * count  # MOST_EXAMPLES is the limit
    offset = (start % rows).astype(jnp.int32) + jnp.arange(count)
    touched = (rows + count - 2) // rows + 1  # epochs that a batch can reach into
    epochs = start // rows + jnp.arange(touched, dtype=jnp.uint32)
    orders = jax.vmap(lambda epoch: jax.random.permutation(jax.random.fold_in(key, epoch), rows))(epochs)
    return orders[offset // rows, offset % rows]


def _draw_rows(sampler: Sampler, arrays: dict[str, Array], key: Array, count: int) -> Array:
    if not sampler.grouped:
        return jax.random.randint(key, (count,), 0, arrays["inputs"].shape[0])
    group_key, member_key = jax.random.split(key)
    offsets, cdf = arrays["group_offsets"], arrays["group_cdf"]
    group = jnp.searchsorted(cdf, jax.random.uniform(group_key, (count,)), side="right")
    group = jnp.minimum(group, cdf.shape[0] - 1)
    size = offsets[group + 1] - offsets[group]
    return offsets[group] + jax.random.randint(member_key, (count,), 0, size)


def _change(
    sampler: Sampler, views_key: Array, row: Array, key: Array, inputs: Array, labels: Array
) -> tuple[Array, Array]:
    """One example under a symmetry: any, or one of the puzzle's fixed ones, of which number 0 changes nothing."""
    assert sampler.view is not None
    if sampler.augmentations is None:
        tokens, cells = sampler.view(key)
        return tokens[inputs][cells], tokens[labels][cells]
    number = jax.random.randint(key, (), 0, sampler.augmentations + 1)
    tokens, cells = sampler.view(jax.random.fold_in(jax.random.fold_in(views_key, row), number))
    changed = tokens[inputs][cells], tokens[labels][cells]
    return jax.tree.map(lambda new, old: jnp.where(number == 0, old, new), changed, (inputs, labels))
