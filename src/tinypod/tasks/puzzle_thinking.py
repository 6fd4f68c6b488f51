"""More thought at test time: a puzzle as several chains, and one answer of them all.

A chain is the puzzle under one symmetry (a view), from one start (a trajectory). The chains of a puzzle are rows of one
larger batch, side by side, so that a batch that is split over devices stays where it is. Chain 0 is the model as it is:
the puzzle itself, without noise. Views are the same for all puzzles, and noise is drawn from the cells of a puzzle: an
answer depends neither on the batch that it is computed in nor on the number of devices.

Shape letters: N steps, B puzzles, C chains, V views, R trajectories, S cells.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from tinypod.config import Config
from tinypod.data.views import View, fixed_views
from tinypod.models import trm
from tinypod.sharding import ANYWHERE, Placement

TABLE = "puzzle_table"

State = trm.Z | trm.SingleZ


class ThinkingConfig(Config):
    """What evaluation and `solve` do besides the steps of one chain. `noise` is the standard deviation of what is added
    to z, which begins with one of 1."""

    views: PositiveInt = 1  # the puzzle itself and so many less one symmetric views of it
    trajectories: PositiveInt = 1  # of each view: one as trained, and others with noise
    noise: NonNegativeFloat = 0.0
    noise_at: Literal["start", "every_step"] = "start"
    choose: Literal["vote", "confident", "first"] = "vote"

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
    q: Array  # float32 [N, B, 2]: the halting logits of the chain that the answer is from, or that agrees with it most
    cost: Array  # float32 [B]: steps of the model, over all chains


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
) -> Callable[[trm.Params, Array, Array], Thought]:
    """`(params, inputs [B, S], identifiers [B]) -> Thought`. `view`: the symmetries, where there are views."""
    V, R, C = thinking.views, thinking.trajectories, thinking.chains

    def think(params: trm.Params, inputs_BS: Array, identifiers_B: Array) -> Thought:
        if C == 1:
            answers_NBS, q_NB2 = run_steps(model, params, inputs_BS, identifiers_B, steps, placement)
            return _choose(thinking, answers_NBS[:, :, None], q_NB2[:, :, None], continues=continues)
        B, S = inputs_BS.shape
        seen_BVS, views = inputs_BS[:, None], None
        if V > 1:
            assert view is not None
            views = fixed_views(view, V)
            seen_BVS = views.apply(inputs_BS)
        noise = make_noise(thinking, inputs_BS) if R > 1 else None
        rows, identifiers = jnp.repeat(seen_BVS, R, axis=1).reshape(B * C, S), jnp.repeat(identifiers_B, C)
        answers, q = run_steps(model, params, rows, identifiers, steps, placement, noise)
        answers_NBVRS = answers.reshape(steps, B, V, R, S)
        if views is not None:
            answers_NBVRS = views.undo(answers_NBVRS, axis=2)
        chains = answers_NBVRS.reshape(steps, B, C, S), q.reshape(steps, B, C, 2)
        return _choose(thinking, *chains, continues=continues)

    return think


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
        def draw(key: Array, number: int, shape: tuple[int, ...]) -> Array:
            return jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, step), number), shape)

        def disturb(number: int, x: Array) -> Array:
            drawn = jax.vmap(lambda key: draw(key, number, x.shape[1:]))(keys)
            return (x.astype(jnp.float32) + std * drawn).astype(x.dtype)

        return type(z)(*(disturb(number, x) for number, x in enumerate(z)))

    return Noise(add, thinking.noise_at == "every_step")


def run_steps(
    model: trm.TrmConfig,
    params: trm.Params,
    inputs_BS: Array,
    identifiers_B: Array,
    steps: int,
    placement: Placement = ANYWHERE,
    noise: Noise | None = None,
) -> tuple[Array, Array]:
    """From scratch: the answer (tokens uint8 [steps, B, S]) and the halting logits ([steps, B, 2]) after each step."""
    table = params.get(TABLE)
    rows = None if table is None else table[identifiers_B]
    start = trm.initial_z(model, params, *inputs_BS.shape)
    if noise is not None:
        start = noise.add(start, jnp.int32(0))

    def advance(z: State, step: Array) -> tuple[State, tuple[Array, Array]]:
        z, logits, q = trm.apply(model, params, z, inputs_BS, rows, placement, gradients=False)
        if noise is not None and noise.every_step:
            z = noise.add(z, step)
        return z, (jnp.argmax(logits, axis=-1).astype(jnp.uint8), q)

    return jax.lax.scan(advance, start, jnp.arange(1, steps + 1))[1]


def _choose(thinking: ThinkingConfig, answers_NBCS: Array, q_NBC2: Array, *, continues: bool) -> Thought:
    N, B, C, _ = answers_NBCS.shape
    lead_NBC = stop_logit(q_NBC2, continues=continues)
    if thinking.choose == "vote" and C > 1:
        answers_NBS, chain_NB = _vote(answers_NBCS, lead_NBC)
    else:
        chain_NB = jnp.argmax(lead_NBC, axis=2)
        answers_NBS = _take(answers_NBCS, chain_NB, axis=2)
    q_NB2 = _take(q_NBC2, chain_NB, axis=2)
    if thinking.choose != "first":
        return Thought(answers_NBS, q_NB2, jnp.full((B,), C * N, jnp.float32))
    # From the step at which one has stopped, its answer stays.
    stopped_NB = stop_logit(q_NB2, continues=continues) > 0
    first_B = jnp.where(jnp.any(stopped_NB, axis=0), jnp.argmax(stopped_NB, axis=0), N - 1)
    at_NB = jnp.minimum(jnp.arange(N)[:, None], first_B[None])
    answers_NBS, q_NB2 = (jnp.take_along_axis(x, at_NB[..., None], axis=0) for x in (answers_NBS, q_NB2))
    return Thought(answers_NBS, q_NB2, C * (first_B + 1).astype(jnp.float32))


def _vote(answers_NBCS: Array, lead_NBC: Array) -> tuple[Array, Array]:
    """Cell by cell, each chain with the weight that its halting logit gives it: the estimate that it is right. And the
    chain that speaks for the outcome: the surest that gave this very answer, or the least sure where none did."""
    logs_NBC = jax.nn.log_sigmoid(lead_NBC)
    weights_NBC = jnp.exp(logs_NBC - jnp.max(logs_NBC, axis=2, keepdims=True))  # of chains all unsure, none is 0
    # The weight of a chain's own digit in each cell, and the chain that has the most: no need to know all the digits.
    same_NBCCS = answers_NBCS[:, :, :, None] == answers_NBCS[:, :, None]
    votes_NBCS = jnp.sum(jnp.where(same_NBCCS, weights_NBC[:, :, None, :, None], 0.0), axis=3)
    answers_NBS = _take(answers_NBCS, jnp.argmax(votes_NBCS, axis=2), axis=2)
    gave_NBC = jnp.all(answers_NBCS == answers_NBS[:, :, None], axis=-1)
    surest = jnp.argmax(jnp.where(gave_NBC, lead_NBC, -jnp.inf), axis=2)
    return answers_NBS, jnp.where(jnp.any(gave_NBC, axis=2), surest, jnp.argmin(lead_NBC, axis=2))


def _take(x: Array, index: Array, axis: int) -> Array:
    """Along one axis, by an index that lacks it, and maybe dims after it."""
    index = jnp.expand_dims(index, axis)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - index.ndim)), axis=axis).squeeze(axis)
