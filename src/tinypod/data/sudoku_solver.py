"""An exhaustive Sudoku solver and a generator of minimal puzzles, compiled by numba.

A grid is one candidate mask a cell (bit d-1 = digit d). Naked and hidden singles run to a fixed point, then
the search tries one digit of a cell with the fewest candidates; once that is refuted it goes on *without* the
digit, which propagates too. A guess is one such trial, and a rating counts them over the proof of uniqueness.

Importing this module imports numba, which is slow and may be absent: import it inside functions.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import njit

from tinypod.data.sudoku import unit_cells

UNLIMITED = 1 << 62


class Solved(NamedTuple):
    counts: np.ndarray  # int32 [N], solutions found, at most `limit`
    solutions: np.ndarray  # uint8 [N, S], the first one; zeros where there is none
    guesses: np.ndarray  # int32 [N]


@lru_cache
def _tables(box: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Cells of each unit uint8 [3n, n], and the cells that share a unit with each cell uint8 [S, P].

    Unsigned, because numba tests every signed index for being negative, which the inner loops feel.
    """
    side = box[0] * box[1]
    units = unit_cells(box).reshape(3 * side, side)
    shares = np.zeros((side * side, side * side), bool)
    for unit in units:
        shares[np.ix_(unit, unit)] = True
    np.fill_diagonal(shares, False)
    peers = np.nonzero(shares)[1].reshape(side * side, -1)
    return units.astype(np.uint8), peers.astype(np.uint8)


@njit(cache=True, nogil=True)
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(cache=True, nogil=True)
def _random_below(rng, limit):  # type: ignore[no-untyped-def]
    """SplitMix64 (Steele et al. 2014) on `rng` uint64 [1], so that each attempt owns its random numbers."""
    rng[0] += np.uint64(0x9E3779B97F4A7C15)
    return np.int64(_mix(rng[0]) >> np.uint64(33)) % limit


@njit(cache=True, nogil=True)
def _shuffle(order, rng):  # type: ignore[no-untyped-def]
    for i in range(len(order) - 1, 0, -1):
        j = _random_below(rng, i + 1)
        order[i], order[j] = order[j], order[i]


@njit(cache=True, nogil=True)
def _propagate(state, queue, size, units, peers):  # type: ignore[no-untyped-def]
    """Naked and hidden singles to a fixed point, False if none; `queue[:size]` just became single."""
    num_units, side = units.shape
    full = (1 << side) - 1
    while True:
        while size > 0:
            size -= 1
            cell = queue[size]
            bit = state[cell]
            for k in range(peers.shape[1]):
                peer = peers[cell, k]
                mask = state[peer]
                if mask & bit:
                    mask ^= bit
                    if mask == 0:
                        return False
                    state[peer] = mask
                    if mask & (mask - 1) == 0:
                        queue[size] = peer
                        size += 1
        for u in range(num_units):
            once, twice, single = 0, 0, 0
            for i in range(side):
                mask = state[units[u, i]]
                twice |= once & mask
                once |= mask
                if mask & (mask - 1) == 0:
                    single |= mask
            if once != full:
                return False
            hidden = once & ~twice & ~single
            if hidden:
                for i in range(side):
                    cell = units[u, i]
                    only = state[cell] & hidden
                    if only:
                        if only & (only - 1):
                            return False
                        state[cell] = only
                        queue[size] = cell
                        size += 1
        if size == 0:
            return True


@njit(cache=True, nogil=True)
def _popcount(mask):  # type: ignore[no-untyped-def]
    number = 0
    while mask:
        mask &= mask - 1
        number += 1
    return number


@njit(cache=True, nogil=True)
def _branch_cell(state, peers, rng):  # type: ignore[no-untyped-def]
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
            score = _random_below(rng, 1 << 20)
        else:
            for k in range(peers.shape[1]):
                score += (state[peers[cell, k]] & mask) != 0
        if number < fewest or score > top:
            best, fewest, top = cell, number, score
    return best


@njit(cache=True, nogil=True)
def _branch_bit(mask, rng):  # type: ignore[no-untyped-def]
    """The lowest candidate, or with an `rng` a random one."""
    if len(rng):
        for _ in range(_random_below(rng, _popcount(mask))):
            mask &= mask - 1
    return mask & -mask


@njit(cache=True, nogil=True)
def _search(stack, queue, size, units, peers, limit, max_guesses, rng, solution):  # type: ignore[no-untyped-def]
    """Searches from `stack[0]`; returns solutions found (up to `limit`; -1 if out of guesses) and guesses."""
    branched = np.empty(len(stack), np.uint8)
    depth, found, guesses = 0, 0, 0
    alive = _propagate(stack[0], queue, size, units, peers)
    while True:
        if alive:
            state = stack[depth]
            cell = _branch_cell(state, peers, rng)
            if cell >= 0:
                if guesses >= max_guesses:
                    return -1, guesses
                guesses += 1
                bit = _branch_bit(state[cell], rng)
                stack[depth + 1] = state
                state[cell] ^= bit  # what is left to try when the guess is refuted
                branched[depth] = cell
                depth += 1
                stack[depth, cell] = bit
                queue[0] = cell
                alive = _propagate(stack[depth], queue, 1, units, peers)
                continue
            if found == 0:
                solution[:] = state
            found += 1
            if found == limit:
                return found, guesses
        if depth == 0:
            return found, guesses
        depth -= 1
        cell = branched[depth]
        size = 0
        if stack[depth, cell] & (stack[depth, cell] - 1) == 0:
            queue[0] = cell
            size = 1
        alive = _propagate(stack[depth], queue, size, units, peers)


@njit(cache=True, nogil=True)
def _load(puzzle, side, state, queue):  # type: ignore[no-untyped-def]
    """Writes a puzzle's masks and queues its clues; returns how many."""
    full = (1 << side) - 1
    size = 0
    for cell in range(len(puzzle)):
        if puzzle[cell]:
            state[cell] = 1 << (puzzle[cell] - 1)
            queue[size] = cell
            size += 1
        else:
            state[cell] = full
    return size


@njit(cache=True, nogil=True)
def _digits(state, out):  # type: ignore[no-untyped-def]
    for cell in range(len(state)):
        digit = 0
        while state[cell] >> digit:
            digit += 1
        out[cell] = digit


@njit(cache=True, nogil=True)
def _solve_batch(puzzles, units, peers, limit, counts, solutions, guesses):  # type: ignore[no-untyped-def]
    num_cells = puzzles.shape[1]
    stack = np.empty((num_cells + 1, num_cells), np.int32)
    queue = np.empty(num_cells, np.uint8)
    solution = np.empty(num_cells, np.int32)
    no_rng = np.empty(0, np.uint64)
    for i in range(len(puzzles)):
        size = _load(puzzles[i], units.shape[1], stack[0], queue)
        counts[i], guesses[i] = _search(stack, queue, size, units, peers, limit, UNLIMITED, no_rng, solution)
        if counts[i]:
            _digits(solution, solutions[i])


@njit(cache=True, nogil=True)
def _generate_batch(seed, first, units, peers, clues, max_guesses, puzzles, answers, ratings):  # type: ignore[no-untyped-def]
    """Attempts `first`, `first + 1`, ...; an attempt that runs out of guesses leaves rating -1."""
    num_cells = puzzles.shape[1]
    stack = np.empty((num_cells + 1, num_cells), np.int32)
    queue = np.empty(num_cells, np.uint8)
    solution = np.empty(num_cells, np.int32)
    order = np.arange(num_cells)
    rng = np.empty(1, np.uint64)
    no_rng = np.empty(0, np.uint64)
    for i in range(len(puzzles)):
        puzzle, answer = puzzles[i], answers[i]
        rng[0] = _mix(_mix(seed ^ np.uint64(0x5851F42D4C957F2D)) + np.uint64(first + i))
        ratings[i] = -1
        puzzle[:] = 0
        size = _load(puzzle, units.shape[1], stack[0], queue)
        found, _ = _search(stack, queue, size, units, peers, 1, max_guesses, rng, solution)
        if found != 1:
            continue
        _digits(solution, answer)
        puzzle[:] = answer
        for cell in range(num_cells):
            order[cell] = cell
        _shuffle(order, rng)
        complete = True
        for k in range(num_cells):
            # A clue may go if and only if no solution has another digit in its cell.
            cell = order[k]
            puzzle[cell] = 0
            size = _load(puzzle, units.shape[1], stack[0], queue)
            stack[0, cell] ^= 1 << (answer[cell] - 1)
            if stack[0, cell] & (stack[0, cell] - 1) == 0:  # side 2 only
                queue[size] = cell
                size += 1
            found, _ = _search(stack, queue, size, units, peers, 1, max_guesses, no_rng, solution)
            if found < 0:
                complete = False
                break
            if found > 0:
                puzzle[cell] = answer[cell]
        if not complete:
            continue
        kept = 0
        for cell in range(num_cells):
            kept += puzzle[cell] > 0
        _shuffle(order, rng)
        for k in range(num_cells):
            if kept >= clues:
                break
            if puzzle[order[k]] == 0:
                puzzle[order[k]] = answer[order[k]]
                kept += 1
        size = _load(puzzle, units.shape[1], stack[0], queue)
        _, ratings[i] = _search(stack, queue, size, units, peers, 2, UNLIMITED, no_rng, solution)


def solve_batch(puzzles: np.ndarray, box: tuple[int, int] = (3, 3), limit: int = 2) -> Solved:
    """Counts solutions of uint8 [N, S] puzzles up to `limit`; a count of 1 with limit 2 proves uniqueness."""
    puzzles = np.ascontiguousarray(puzzles, np.uint8)
    num = len(puzzles)
    out = Solved(np.zeros(num, np.int32), np.zeros_like(puzzles), np.zeros(num, np.int32))
    _solve_batch(puzzles, *_tables(box), limit, out.counts, out.solutions, out.guesses)
    return out


def solve(puzzle: np.ndarray, box: tuple[int, int] = (3, 3), limit: int = 2) -> tuple[int, np.ndarray, int]:
    """Number of solutions up to `limit`, the first one, and the guesses, of one uint8 [S] puzzle."""
    out = solve_batch(puzzle[None], box, limit)
    return int(out.counts[0]), out.solutions[0], int(out.guesses[0])


def generate_batch(
    box: tuple[int, int], seed: int, first: int, num: int, clues: int = 0, max_guesses: int = 100_000
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Puzzles, answers and ratings of attempts first..first+num-1; rating -1 marks one given up on."""
    num_cells = (box[0] * box[1]) ** 2
    puzzles, answers = np.zeros((num, num_cells), np.uint8), np.zeros((num, num_cells), np.uint8)
    ratings = np.zeros(num, np.int32)
    state = np.uint64(seed % 2**64)
    _generate_batch(state, first, *_tables(box), clues, max_guesses, puzzles, answers, ratings)
    return puzzles, answers, ratings
