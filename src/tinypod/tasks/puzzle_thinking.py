"""More thought at test time: a puzzle as several chains, and one answer of them all.

A chain is the puzzle under one symmetry (a view), from one start (a trajectory). The chains of a puzzle are rows of one
larger batch, side by side, so that a batch that is split over devices stays where it is. Chain 0 is the model as it is:
the puzzle itself, without noise. Views are the same for all puzzles, and noise is drawn from the cells of a puzzle: an
answer depends neither on the batch that it is computed in nor on the number of devices.

One answer is made of all chains within each step, so that of the steps before only that one is kept.

Shape letters: N steps, B puzzles, C chains, V views, R trajectories, S cells.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from tinypod.config import Config
from tinypod.data.sudoku import FIRST_DIGIT, Box, side_of, unit_cells
from tinypod.data.views import View, fixed_views
from tinypod.models import trm
from tinypod.sharding import ANYWHERE, Placement

TABLE = "puzzle_table"
UNDECIDED = 1e-3  # how far below stopping, relative to the logits, the one of a chain stays that has not settled
KNOWN = 20.0  # the halting logit of an answer that the rules have judged, or less this

# How one answer is made of all chains. `first` and `settled` end with the first chain that would stop, `settled` if it
# also gave its answer in the step before; `valid` with the first that the rules accept, not the model.
Choose = Literal["vote", "confident", "first", "settled", "valid"]
State = trm.Z | trm.SingleZ
Rules = Callable[[Array, Array], Array]  # (answers [B, C, S], puzzles [B, S]) -> whether each solves its puzzle [B, C]


class ThinkingConfig(Config):
    """What evaluation and `solve` do besides the steps of one chain. `noise` is the standard deviation of what is added
    to z, which begins with one of 1."""

    views: PositiveInt = 1  # the puzzle itself and so many less one symmetric views of it
    trajectories: PositiveInt = 1  # of each view: one as trained, and others with noise
    noise: NonNegativeFloat = 0.0
    noise_at: Literal["start", "every_step"] = "start"
    choose: Choose = "vote"

    @model_validator(mode="after")
    def _noise_goes_with_trajectories(self) -> "ThinkingConfig":
        if self.trajectories > 1 and not self.noise:
            raise ValueError(
                f"trajectories={self.trajectories} are all the same without noise; set noise, such as 0.5 (--noise 0.5)"
            )
        if self.noise and self.trajectories == 1:
            raise ValueError(
                f"noise={self.noise} is for trajectories after the first; set trajectories (--trajectories 4)"
            )
        return self

    @property
    def chains(self) -> int:
        return self.views * self.trajectories


class Thought(NamedTuple):
    """After each step, the answer so far; and what all of it cost."""

    answers: Array  # tokens uint8 [N, B, S]
    # Float32 [N, B, 2]: the halting logits of the chain that the answer is from, or that agrees with it most; or what
    # the rules say, where they choose.
    q: Array
    cost: Array  # float32 [B]: steps of the model, over all chains


class Choice(NamedTuple):
    """One answer of all chains, after a step, or after each with a dim N in front."""

    answers: Array  # tokens uint8 [B, S]
    q: Array  # float32 [B, 2], as in Thought


def stop_logit(q: Array, *, continues: bool) -> Array:
    """Above 0 where the model would stop: of the halting logits [..., 2], the first, or its lead over the second where
    that one was trained, too (task.continue_loss)."""
    return q[..., 0] - q[..., 1] if continues else q[..., 0]


def make_think(
    model: trm.TrmConfig,
    thinking: ThinkingConfig,
    view: View | None,
    steps: int,
    placement: Placement = ANYWHERE,
    *,
    continues: bool = False,
    rules: Rules | None = None,
) -> Callable[[trm.Params, Array, Array], Thought]:
    """`(params, inputs [B, S], identifiers [B]) -> Thought`. `view`: the symmetries, where there are views. `rules`: of
    the puzzles, where they choose."""
    V, R, C = thinking.views, thinking.trajectories, thinking.chains

    def think(params: trm.Params, inputs_BS: Array, identifiers_B: Array) -> Thought:
        B, S = inputs_BS.shape
        seen_BVS, views = inputs_BS[:, None], None
        if V > 1:
            assert view is not None
            views = fixed_views(view, V)
            seen_BVS = views.apply(inputs_BS)
        noise = make_noise(thinking, inputs_BS) if R > 1 else None
        rows, identifiers = jnp.repeat(seen_BVS, R, axis=1).reshape(B * C, S), jnp.repeat(identifiers_B, C)
        start, advance = make_advance(model, params, rows, identifiers, placement, noise)

        def step(so_far: tuple[State, Array], number: Array) -> tuple[tuple[State, Array], Choice, Array]:
            """From the state of all chains and their answers."""
            z, before_BCS = so_far
            z, answers, q = advance(z, number)
            answers_BVRS = answers.reshape(B, V, R, S)
            if views is not None:
                answers_BVRS = views.undo(answers_BVRS, axis=1)
            answers_BCS, q_BC2 = answers_BVRS.reshape(B, C, S), q.reshape(B, C, 2)
            valid_BC = None if rules is None else rules(answers_BCS, inputs_BS)
            chosen = choose(thinking, answers_BCS, q_BC2, before_BCS, valid_BC, continues=continues)
            return (z, answers_BCS), *chosen

        begun = start, jnp.zeros((B, C, S), jnp.uint8)  # no answer yet: all padding
        if thinking.choose in ("first", "settled", "valid"):
            choices, steps_B = until_stopped(step, begun, steps, (B, S))
        else:
            numbers = jnp.arange(1, steps + 1)
            choices = jax.lax.scan(lambda so_far, number: step(so_far, number)[:2], begun, numbers)[1]
            steps_B = jnp.full((B,), steps)
        return Thought(*choices, C * steps_B.astype(jnp.float32))

    return think


def sudoku_rules(box: Box) -> Rules:
    """An answer that keeps the clues and has each digit once in every row, column and box."""
    side, cells = side_of(box), jnp.asarray(unit_cells(box).reshape(-1))

    def solves(answers_BCS: Array, puzzles_BS: Array) -> Array:
        puzzles_B1S, tokens_BCS = puzzles_BS[:, None], answers_BCS.astype(jnp.int32)
        kept_BC = jnp.all((puzzles_B1S < FIRST_DIGIT) | (tokens_BCS == puzzles_B1S), axis=-1)
        digits_BCS = tokens_BCS - FIRST_DIGIT
        # Only with all of them, once each, do so many powers of two add up to this.
        bits_BCS = jnp.where(digits_BCS < 0, 0, jnp.left_shift(1, jnp.maximum(digits_BCS, 0)))
        sums = jnp.sum(jnp.take(bits_BCS, cells, axis=-1).reshape(*bits_BCS.shape[:2], -1, side), axis=-1)
        return kept_BC & jnp.all(sums == 2**side - 1, axis=-1)

    return solves


class Noise(NamedTuple):
    add: Callable[[State, Array], State]  # (z, step) -> z
    every_step: bool


def make_noise(thinking: ThinkingConfig, inputs_BS: Array) -> Noise:
    """For the chains of these puzzles: none for the first trajectory of each view."""
    root, C = jax.random.key(0), thinking.chains
    factors_S = jax.random.bits(root, inputs_BS.shape[1:], jnp.uint32)
    of_puzzle_B = jnp.sum(inputs_BS.astype(jnp.uint32) * factors_S[None], axis=-1)
    chain_BC = jnp.broadcast_to(jnp.arange(C), (inputs_BS.shape[0], C)).reshape(-1)
    fold = jax.vmap(jax.random.fold_in)
    keys = fold(fold(jnp.broadcast_to(root, chain_BC.shape), jnp.repeat(of_puzzle_B, C)), chain_BC)
    std = jnp.where(chain_BC % thinking.trajectories > 0, jnp.float32(thinking.noise), 0.0)[:, None, None]

    def add(z: State, step: Array) -> State:
        return disturb(z, jax.vmap(jax.random.fold_in, (0, None))(keys, step), std)

    return Noise(add, thinking.noise_at == "every_step")


def disturb(z: State, keys_B: Array, std: Array | float) -> State:
    """The states with normal noise in them, drawn for each row by its key."""

    def add(number: int, x: Array) -> Array:
        drawn = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, number), x.shape[1:]))(keys_B)
        return (x.astype(jnp.float32) + std * drawn).astype(x.dtype)

    return type(z)(*(add(number, x) for number, x in enumerate(z)))


def make_advance(
    model: trm.TrmConfig,
    params: trm.Params,
    inputs_BS: Array,
    identifiers_B: Array,
    placement: Placement = ANYWHERE,
    noise: Noise | None = None,
) -> tuple[State, Callable[[State, Array], tuple[State, Array, Array]]]:
    """From scratch: the state that these rows begin with, and `(z, step from 1) -> (z, answer [B, S], q [B, 2])`."""
    table = params.get(TABLE)
    rows = None if table is None else table[identifiers_B]
    start = trm.initial_z(model, params, *inputs_BS.shape)
    if noise is not None:
        start = noise.add(start, jnp.int32(0))

    def advance(z: State, step: Array) -> tuple[State, Array, Array]:
        z, logits, q = trm.apply(model, params, z, inputs_BS, rows, placement, gradients=False)
        if noise is not None and noise.every_step:
            z = noise.add(z, step)
        return z, jnp.argmax(logits, axis=-1).astype(jnp.uint8), q

    return start, advance


def until_stopped(
    step: Callable[[Any, Array], tuple[Any, Choice, Array]], start: Any, steps: int, shape_BS: tuple[int, int]
) -> tuple[Choice, Array]:
    """Steps, each with the puzzles that stop there ([B]), until all of the batch have stopped, or so many were made.
    From the step at which one has stopped its answer stays: after each of all the steps, the choice; and how many steps
    each took."""
    B, S = shape_BS

    class Done(NamedTuple):
        steps: Array
        steps_B: Array  # of each puzzle before it stopped; as many as were made, for those that still think
        z: Any
        choices: Choice

    def thinks(done: Done) -> Array:
        return (done.steps < steps) & jnp.any(done.steps_B == done.steps)

    def make_step(done: Done) -> Done:
        z, (answers_BS, q_B2), stops_B = step(done.z, done.steps + 1)
        thinks_B = (done.steps_B == done.steps) & ~stops_B
        answers_NBS, q_NB2 = done.choices
        choices = Choice(answers_NBS.at[done.steps].set(answers_BS), q_NB2.at[done.steps].set(q_B2))
        return Done(done.steps + 1, done.steps_B + thinks_B.astype(jnp.int32), z, choices)

    none = Choice(jnp.zeros((steps, B, S), jnp.uint8), jnp.zeros((steps, B, 2), jnp.float32))
    done = jax.lax.while_loop(thinks, make_step, Done(jnp.int32(0), jnp.zeros((B,), jnp.int32), start, none))
    last_B = jnp.minimum(done.steps_B, steps - 1)
    at_NB1 = jnp.minimum(jnp.arange(steps)[:, None], last_B[None])[..., None]
    return Choice(*(jnp.take_along_axis(x, at_NB1, axis=0) for x in done.choices)), last_B + 1


def choose(
    thinking: ThinkingConfig,
    answers_BCS: Array,
    q_BC2: Array,
    before_BCS: Array,
    valid_BC: Array | None = None,
    *,
    continues: bool,
) -> tuple[Choice, Array]:
    """Of the chains after a step; and which puzzles have stopped ([B]). `before`: their answers after the step before.
    `valid`: which answers the rules accept, where they choose."""
    lead_BC = stop_logit(q_BC2, continues=continues)
    if thinking.choose == "vote" and answers_BCS.shape[1] > 1:
        answers_BS, chain_B = _vote(answers_BCS, lead_BC)
        q_B2 = _take(q_BC2, chain_B, axis=1)
        return Choice(answers_BS, q_B2), stop_logit(q_B2, continues=continues) > 0
    ends_BC = lead_BC > 0 if valid_BC is None else valid_BC
    if thinking.choose == "settled":
        ends_BC &= jnp.all(answers_BCS == before_BCS, axis=-1)
    ends_B = jnp.any(ends_BC, axis=1)
    surest_B = jnp.argmax(jnp.where(ends_BC, lead_BC, -jnp.inf), axis=1)
    chain_B = jnp.where(ends_B, surest_B, jnp.argmax(lead_BC, axis=1))
    q_B2 = _take(q_BC2, chain_B, axis=1)
    if valid_BC is not None:  # it is known now, whatever the model thinks of it
        q_B2 = jnp.where(ends_B[:, None], KNOWN, -KNOWN) * jnp.asarray([1.0, -1.0])[None]
    # Where nothing ends the thinking, no logit may say that the model would have stopped, nor by a rounding error.
    against_B = q_B2[:, 1] if continues else jnp.zeros_like(q_B2[:, 1])
    highest_B = against_B - UNDECIDED * (1 + jnp.abs(against_B))
    q_B2 = q_B2.at[:, 0].set(jnp.where(ends_B, q_B2[:, 0], jnp.minimum(q_B2[:, 0], highest_B)))
    return Choice(_take(answers_BCS, chain_B, axis=1), q_B2), ends_B


def _vote(answers_BCS: Array, lead_BC: Array) -> tuple[Array, Array]:
    """Cell by cell, each chain with the weight that its halting logit gives it: the estimate that it is right. And the
    chain that speaks for the outcome: the surest that gave this very answer, or the least sure where none did."""
    logs_BC = jax.nn.log_sigmoid(lead_BC)
    weights_BC = jnp.exp(logs_BC - jnp.max(logs_BC, axis=1, keepdims=True))  # of chains all unsure, none is 0
    # The weight of a chain's own digit in each cell, and the chain that has the most: no need to know all the digits.
    same_BCCS = answers_BCS[:, :, None] == answers_BCS[:, None]
    votes_BCS = jnp.sum(jnp.where(same_BCCS, weights_BC[:, None, :, None], 0.0), axis=2)
    answers_BS = _take(answers_BCS, jnp.argmax(votes_BCS, axis=1), axis=1)
    gave_BC = jnp.all(answers_BCS == answers_BS[:, None], axis=-1)
    surest_B = jnp.argmax(jnp.where(gave_BC, lead_BC, -jnp.inf), axis=1)
    return answers_BS, jnp.where(jnp.any(gave_BC, axis=1), surest_B, jnp.argmin(lead_BC, axis=1))


def _take(x: Array, index: Array, axis: int) -> Array:
    """Along one axis, by an index that lacks it, and maybe dims after it."""
    index = jnp.expand_dims(index, axis)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - index.ndim)), axis=axis).squeeze(axis)
