"""Batches made on the device. The base puzzles lie in device memory; each step draws rows and changes them by a random
symmetry, inside the compiled program. A batch is a pure function of the arrays and a key.

Sampling is with replacement: under adaptive computation a row takes a new example only when it has finished, so most of
what an epoch-by-epoch order would offer is never looked at anyway.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tinypod.data.puzzles import Split
from tinypod.data.sudoku import FIRST_DIGIT, Box

IGNORED_LABEL = -100

# key -> (token of each token, cell that each cell comes from)
View = Callable[[Array], tuple[Array, Array]]


@dataclass(frozen=True)
class Sampler:
    """How examples are drawn: the symmetries, and how many fixed views a puzzle has (None: endless)."""

    view: View | None
    augmentations: int | None
    grouped: bool


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


def device_arrays(split: Split) -> dict[str, Any]:
    """What `draw_examples` reads, as host arrays ready to be put on the device."""
    arrays: dict[str, Any] = {name: getattr(split, name) for name in ("inputs", "labels", "identifiers")}
    if split.group_offsets is not None and split.group_weights is not None:
        weights = split.group_weights / split.group_weights.sum()
        arrays["group_offsets"] = split.group_offsets.astype(np.int32)
        arrays["group_cdf"] = np.cumsum(weights).astype(np.float32)
    return arrays


def draw_examples(
    sampler: Sampler, arrays: dict[str, Array], key: Array, views_key: Array, count: int
) -> dict[str, Array]:
    """`count` examples: inputs and labels int32 [count, S] (unlabelled cells -100), identifiers [count].

    `key` decides which, `views_key` what the fixed views of each puzzle are.
    """
    row_key, view_key = jax.random.split(key)
    rows = _draw_rows(sampler, arrays, row_key, count)
    inputs, labels = arrays["inputs"][rows].astype(jnp.int32), arrays["labels"][rows].astype(jnp.int32)
    if sampler.view is not None and sampler.augmentations != 0:
        inputs, labels = jax.vmap(_change, in_axes=(None, None, 0, 0, 0, 0))(
            sampler, views_key, rows, jax.random.split(view_key, count), inputs, labels
        )
    labels = jnp.where(labels == 0, IGNORED_LABEL, labels)
    return {"inputs": inputs, "labels": labels, "identifiers": arrays["identifiers"][rows]}


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
