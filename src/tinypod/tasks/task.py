"""What the training loop needs to know about a job. TRM training and distillation differ only here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax import Array

Tree = Any  # a nested dict of arrays


@dataclass(frozen=True)
class Task:
    """A job as functions. Every one is pure and runs inside the compiled step, except `summarise`.

    Parameters are a dict whose top-level keys are groups: those in `frozen` are never updated; those in `tables` are
    updated only in the rows that a batch looks up; all others are trained by the optimizer and averaged (EMA).

    `draw(source, key)` makes the global batch, every leaf with the batch's rows first. `begin` lets it into the carry.
    `loss` returns the *sum* over rows, so that accumulating over parts of a batch is adding.
    """

    init_params: Callable[[Array], Tree]
    init_carry: Callable[[Tree], Tree]  # params -> carry of a whole batch
    draw: Callable[[Tree, Array], Tree]  # (source, key) -> batch
    begin: Callable[[Tree, Tree, Tree], Tree]  # (params, carry, batch) -> carry
    lookup: Callable[[Tree], dict[str, Array]]  # carry -> row ids for each table
    loss: Callable[..., Any]  # (params, rows, carry, batch) -> loss, (carry, sums)
    summarise: Callable[[Mapping[str, float]], dict[str, float]]  # sums over steps -> metrics by name
    frozen: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
