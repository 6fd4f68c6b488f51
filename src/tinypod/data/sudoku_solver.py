"""An exhaustive Sudoku solver and a generator of minimal puzzles, compiled by numba where that is installed.

A grid is one candidate mask a cell (bit d-1 = digit d). Naked and hidden singles run to a fixed point, then
the search tries one digit of a cell with the fewest candidates; once that is refuted it goes on *without* the
digit, which propagates too. A guess is one such trial, and a rating counts them over the proof of uniqueness.

Without numba the same functions run as plain Python, on lists of ints instead of arrays (which are slow one by one),
and find the same: a 6×6 puzzle in a few milliseconds, where compiled code takes some microseconds.

Importing this module imports numba, which is slow: import it inside functions.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tinypod.data.sudoku_rules import unit_cells

try:
    from numba import njit

    COMPILED = True
    INT, UINT = np.int64, np.uint64
except ImportError:
    COMPILED = False
    INT = UINT = int  # type: ignore[assignment]

    def njit(**_: bool) -> Callable[[Any], Any]:
        return lambda function: function


UNLIMITED = 1 << 62
# SplitMix64 (Steele et al. 2014). Python's ints do not wrap around at 64 bits, hence the mask.
MASK, GOLDEN, SEED = UINT(2**64 - 1), UINT(0x9E3779B97F4A7C15), UINT(0x5851F42D4C957F2D)
MIX_1, MIX_2 = UINT(0xBF58476D1CE4E5B9), UINT(0x94D049BB133111EB)
S27, S30, S31, S33 = UINT(27), UINT(30), UINT(31), UINT(33)


class Solved(NamedTuple):
    counts: np.ndarray  # int32 [N], solutions found, at most `limit`
    solutions: np.ndarray  # uint8 [N, S], the first one; zeros where there is none
    guesses: np.ndarray  # int32 [N]


def _native(array: np.ndarray) -> Any:
    return array if COMPILED else array.tolist()


@lru_cache
def _tables(box: tuple[int, int]) -> tuple[Any, Any]:
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
    return _native(units.astype(np.uint8)), _native(peers.astype(np.uint8))


def _workspace(num_cells: int) -> tuple[Any, ...]:
    """What a search writes to: states by depth, the cell tried at each, cells that became single, a solution."""
    depths = num_cells + 1
    shapes = (((depths, num_cells), np.int32), (depths, np.uint8), (num_cells, np.uint8), (num_cells, np.int32))
    return tuple(_native(np.zeros(shape, dtype)) for shape, dtype in shapes)


@njit(cache=True, nogil=True)
def _mix(z):  # type: ignore[no-untyped-def]
    z = ((z ^ (z >> S30)) * MIX_1) & MASK
    z = ((z ^ (z >> S27)) * MIX_2) & MASK
    return z ^ (z >> S31)


@njit(cache=True, nogil=True)
def _random_below(rng, limit):  # type: ignore[no-untyped-def]
    """From the state `rng` uint64 [1], so that each attempt owns its random numbers."""
    rng[0] = (rng[0] + GOLDEN) & MASK
    return INT(_mix(rng[0]) >> S33) % limit


@njit(cache=True, nogil=True)
def _shuffle(order, rng):  # type: ignore[no-untyped-def]
    for i in range(len(order) - 1, 0, -1):
        j = _random_below(rng, i + 1)
        order[i], order[j] = order[j], order[i]


@njit(cache=True, nogil=True)
def _propagate(state, queue, size, units, peers):  # type: ignore[no-untyped-def]
    """Naked and hidden singles to a fixed point, False if none; `queue[:size]` just became single."""
    side = len(units[0])
    full = (1 << side) - 1
    while True:
        while size > 0:
            size -= 1
            cell = queue[size]
            bit = state[cell]
            for peer in peers[cell]:
                mask = state[peer]
                if mask & bit:
                    mask ^= bit
                    if mask == 0:
                        return False
                    state[peer] = mask
                    if mask & (mask - 1) == 0:
                        queue[size] = peer
                        size += 1
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
            for peer in peers[cell]:
                score += (state[peer] & mask) != 0
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
def _search(workspace, size, units, peers, limit, max_guesses, rng):  # type: ignore[no-untyped-def]
    """Searches from `stack[0]`; returns solutions found (up to `limit`; -1 if out of guesses) and guesses."""
    stack, branched, queue, solution = workspace
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
                stack[depth + 1][:] = state
                state[cell] ^= bit  # what is left to try when the guess is refuted
                branched[depth] = cell
                depth += 1
                stack[depth][cell] = bit
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
        if stack[depth][cell] & (stack[depth][cell] - 1) == 0:
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
def _solve_batch(workspace, puzzles, units, peers, limit, no_rng, counts, solutions, guesses):  # type: ignore[no-untyped-def]
    stack, _, queue, solution = workspace
    for i in range(len(puzzles)):
        size = _load(puzzles[i], len(units[0]), stack[0], queue)
        counts[i], guesses[i] = _search(workspace, size, units, peers, limit, UNLIMITED, no_rng)
        if counts[i]:
            _digits(solution, solutions[i])


@njit(cache=True, nogil=True)
def _generate_batch(  # type: ignore[no-untyped-def]
    workspace, order, seed, rng, no_rng, first, units, peers, clues, max_guesses, puzzles, answers, ratings
):
    """Attempts `first`, `first + 1`, ... into puzzles of zeros; one that runs out of guesses leaves rating -1."""
    stack, _, queue, solution = workspace
    side, num_cells = len(units[0]), len(order)
    for i in range(len(puzzles)):
        puzzle, answer = puzzles[i], answers[i]
        rng[0] = _mix((_mix(seed ^ SEED) + UINT(first + i)) & MASK)
        ratings[i] = -1
        size = _load(puzzle, side, stack[0], queue)
        found, _ = _search(workspace, size, units, peers, 1, max_guesses, rng)
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
            size = _load(puzzle, side, stack[0], queue)
            stack[0][cell] ^= 1 << (answer[cell] - 1)
            if stack[0][cell] & (stack[0][cell] - 1) == 0:  # side 2 only
                queue[size] = cell
                size += 1
            found, _ = _search(workspace, size, units, peers, 1, max_guesses, no_rng)
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
        size = _load(puzzle, side, stack[0], queue)
        _, ratings[i] = _search(workspace, size, units, peers, 2, UNLIMITED, no_rng)


def solve_batch(puzzles: np.ndarray, box: tuple[int, int] = (3, 3), limit: int = 2) -> Solved:
    """Counts solutions of uint8 [N, S] puzzles up to `limit`; a count of 1 with limit 2 proves uniqueness."""
    puzzles = np.ascontiguousarray(puzzles, np.uint8)
    num, num_cells = puzzles.shape
    counts, guesses = (_native(np.zeros(num, np.int32)) for _ in range(2))
    solutions, no_rng = _native(np.zeros_like(puzzles)), _native(np.zeros(0, np.uint64))
    arguments = (_native(puzzles), *_tables(box), limit, no_rng, counts, solutions, guesses)
    _solve_batch(_workspace(num_cells), *arguments)
    shaped = np.asarray(solutions, np.uint8).reshape(num, num_cells)
    return Solved(np.asarray(counts, np.int32), shaped, np.asarray(guesses, np.int32))


def solve(puzzle: np.ndarray, box: tuple[int, int] = (3, 3), limit: int = 2) -> tuple[int, np.ndarray, int]:
    """Number of solutions up to `limit`, the first one, and the guesses, of one uint8 [S] puzzle."""
    out = solve_batch(puzzle[None], box, limit)
    return int(out.counts[0]), out.solutions[0], int(out.guesses[0])


def generate_batch(
    box: tuple[int, int], seed: int, first: int, num: int, clues: int = 0, max_guesses: int = 100_000
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Puzzles, answers and ratings of attempts first..first+num-1; rating -1 marks one given up on."""
    num_cells = (box[0] * box[1]) ** 2
    puzzles, answers = (_native(np.zeros((num, num_cells), np.uint8)) for _ in range(2))
    ratings, order = _native(np.zeros(num, np.int32)), _native(np.arange(num_cells))
    rng, no_rng = _native(np.zeros(1, np.uint64)), _native(np.zeros(0, np.uint64))
    arguments = (order, UINT(seed % 2**64), rng, no_rng, first, *_tables(box), clues, max_guesses)
    _generate_batch(_workspace(num_cells), *arguments, puzzles, answers, ratings)
    return np.asarray(puzzles, np.uint8), np.asarray(answers, np.uint8), np.asarray(ratings, np.int32)
