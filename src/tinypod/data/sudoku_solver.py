"""An exhaustive Sudoku solver, compiled by numba where that is installed.

A state is one mask of candidates a cell (bit d-1 = digit d). Naked and hidden singles run to a fixed point, then the
search tries one digit of a cell with the fewest candidates; once that is refuted it continues *without* the digit,
which propagates too. A guess is one such trial, and a rating counts them over the proof of uniqueness.

Without numba the same functions run as plain Python, on lists of ints instead of arrays (which are slow one by one),
and find the same. Importing this module imports numba, which is slow: import it inside functions.
"""
# mypy: allow-untyped-defs

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tinypod.data.sudoku import Box, unit_cells

try:
    from numba import njit

    COMPILED = True
    INT, UINT = np.int64, np.uint64
except ImportError:
    COMPILED = False
    INT = UINT = int  # type: ignore[assignment]

UNLIMITED = 1 << 62
# SplitMix64 (Steele et al. 2014). Python's ints do not wrap around at 64 bits, hence the mask.
MASK, GOLDEN = UINT(2**64 - 1), UINT(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = UINT(0xBF58476D1CE4E5B9), UINT(0x94D049BB133111EB)
S27, S30, S31, S33 = UINT(27), UINT(30), UINT(31), UINT(33)


class Solved(NamedTuple):
    counts: np.ndarray  # int32 [N], solutions found, at most `limit`
    solutions: np.ndarray  # uint8 [N, S], the first one; zeros where there is none
    guesses: np.ndarray  # int32 [N]


def compiled(function: Any) -> Any:
    return njit(cache=True, nogil=True)(function) if COMPILED else function


def native(array: np.ndarray) -> Any:
    return array if COMPILED else array.tolist()


@lru_cache
def tables(box: Box) -> tuple[Any, Any]:
    """Cells of each unit uint8 [3n, n], and the cells that share a unit with each cell uint8 [S, P].

    Unsigned, because numba tests every signed index for being negative, which the inner loops feel.
    """
    units = unit_cells(box).reshape(-1, box[0] * box[1])
    shares = np.zeros((units.max() + 1,) * 2, bool)
    for unit in units:
        shares[np.ix_(unit, unit)] = True
    np.fill_diagonal(shares, False)
    peers = np.nonzero(shares)[1].reshape(len(shares), -1)
    return native(units.astype(np.uint8)), native(peers.astype(np.uint8))


@compiled
def mix(z):
    z = ((z ^ (z >> S30)) * MIX_1) & MASK
    z = ((z ^ (z >> S27)) * MIX_2) & MASK
    return z ^ (z >> S31)


@compiled
def random_below(rng, limit):
    """From the state `rng` uint64 [1], so that each attempt owns its random numbers."""
    rng[0] = (rng[0] + GOLDEN) & MASK
    return INT(mix(rng[0]) >> S33) % limit


@compiled
def _propagate(state, queue, units, peers):
    """Naked and hidden singles to a fixed point, False if there is none; cells in `queue` just became single."""
    full = (1 << len(units[0])) - 1
    while True:
        while len(queue):
            cell = queue.pop()
            bit = state[cell]
            for peer in peers[cell]:
                mask = state[peer]
                if mask & bit:
                    mask ^= bit
                    if mask == 0:
                        return False
                    state[peer] = mask
                    if mask & (mask - 1) == 0:
                        queue.append(peer)
        for unit in units:
            once, twice, single = 0, 0, 0
            for cell in unit:
                mask = state[cell]
                twice |= once & mask
                once |= mask
                if mask & (mask - 1) == 0:
                    single |= mask
            if once != full:
                return False
            hidden = once & ~twice & ~single
            if hidden:
                for cell in unit:
                    only = state[cell] & hidden
                    if only:
                        if only & (only - 1):
                            return False
                        state[cell] = only
                        queue.append(cell)
        if not len(queue):
            return True


@compiled
def _popcount(mask):
    number = 0
    while mask:
        mask &= mask - 1
        number += 1
    return number


@compiled
def _branch_cell(state, peers, rng):
    """An open cell with the fewest candidates, -1 if none; of several a random one if there is an `rng`.

    Otherwise the one whose candidates most peers share: on the hardest lists that nearly halves the guesses.
    """
    best, fewest, top = -1, 99, 0
    for cell in range(len(state)):
        mask = state[cell]
        number = _popcount(mask)
        if number == 1 or number > fewest:
            continue
        score = 0
        if len(rng):
            score = random_below(rng, 1 << 20)
        else:
            for peer in peers[cell]:
                score += (state[peer] & mask) != 0
        if number < fewest or score > top:
            best, fewest, top = cell, number, score
    return best


@compiled
def _branch_bit(mask, rng):
    """The lowest candidate, or with an `rng` a random one."""
    if len(rng):
        for _ in range(random_below(rng, _popcount(mask))):
            mask &= mask - 1
    return mask & -mask


@compiled
def search(start, units, peers, limit, max_guesses, rng):
    """Solutions found (up to `limit`; -1 if out of guesses), guesses, and the first solution if there is one."""
    first, found, guesses = start, 0, 0
    queue = [cell for cell in range(len(start)) if start[cell] & (start[cell] - 1) == 0]
    waiting = [(start.copy(), 0)]  # states to look at, each with the cell that changed last
    while waiting and found < limit:
        state, cell = waiting.pop()
        if state[cell] & (state[cell] - 1) == 0:
            queue.append(cell)
        if not _propagate(state, queue, units, peers):
            queue.clear()
            continue
        cell = _branch_cell(state, peers, rng)
        if cell < 0:
            first = state if found == 0 else first
            found += 1
            continue
        if guesses >= max_guesses:
            return -1, guesses, first
        guesses += 1
        guess = state.copy()
        guess[cell] = _branch_bit(state[cell], rng)
        state[cell] ^= guess[cell]  # what is left to try when the guess is refuted
        waiting.append((state, cell))
        waiting.append((guess, cell))
    return found, guesses, first


@compiled
def _solve_batch(states, units, peers, limit, no_rng, counts, guesses):
    """Puts each state's first solution in its place."""
    for i in range(len(states)):
        counts[i], guesses[i], states[i][:] = search(states[i], units, peers, limit, UNLIMITED, no_rng)


def solve_batch(puzzles: np.ndarray, box: Box = (3, 3), limit: int = 2) -> Solved:
    """Counts solutions of uint8 [N, S] puzzles up to `limit`; a count of 1 with limit 2 proves uniqueness."""
    full = 2 ** (box[0] * box[1]) - 1
    states = native(np.where(puzzles > 0, 1 << (puzzles.astype(np.int32) - 1), full).astype(np.int32))
    counts, guesses = (native(np.zeros(len(puzzles), np.int32)) for _ in range(2))
    _solve_batch(states, *tables(box), limit, native(np.zeros(0, np.uint64)), counts, guesses)
    solved = np.asarray(counts, np.int32)
    solutions = masks_to_digits(np.asarray(states).reshape(puzzles.shape), full)
    return Solved(solved, np.where(solved[:, None] > 0, solutions, np.uint8(0)), np.asarray(guesses, np.int32))


def masks_to_digits(states: Any, full: int) -> np.ndarray:
    """Of masks with one candidate; 0 for those with all."""
    masks = np.asarray(states)
    return np.where(masks == full, 0, np.frexp(masks)[1]).astype(np.uint8)
