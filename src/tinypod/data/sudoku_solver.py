"""An exhaustive Sudoku solver and a maker of minimal puzzles, compiled by numba where that is installed.

A state is one mask of candidates a cell (bit d-1 = digit d). Naked and hidden singles run to a fixed point, then the
search tries one digit of a cell with the fewest candidates; once that is refuted it continues *without* the digit,
which propagates too. A guess is one such trial, and a rating counts them over the proof of uniqueness.

Without numba the same functions run as plain Python, on lists of ints instead of arrays (which are slow one by one),
and find the same. Compiled functions stay in one file: numba's cache does not notice when another file changes.
Importing this module imports numba, which is slow: import it inside functions.
"""
# mypy: allow-untyped-defs

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tinypod.data.sudoku import Box, Clues, unit_cells

try:
    from numba import njit

    COMPILED = True
    INT, UINT = np.int64, np.uint64
except ImportError:
    COMPILED = False
    INT = UINT = int  # type: ignore[assignment]

MAX_GUESSES, UNLIMITED = 100_000, 1 << 62  # of a search, before an attempt at a puzzle is given up
TAKEN, MOST_ANSWERS, FROM_EACH = 2, 8192, 4  # an attempt's clues exchanged, answers looked at, puzzles kept
WORD = 62  # bits used of an int64, so that none is the sign
# SplitMix64 (Steele et al. 2014). Python's ints do not wrap around at 64 bits, hence the mask.
MASK, GOLDEN, SEED = UINT(2**64 - 1), UINT(0x9E3779B97F4A7C15), UINT(0x5851F42D4C957F2D)
MIX_1, MIX_2 = UINT(0xBF58476D1CE4E5B9), UINT(0x94D049BB133111EB)
S27, S30, S31, S33 = UINT(27), UINT(30), UINT(31), UINT(33)


class Solved(NamedTuple):
    counts: np.ndarray  # int32 [N], solutions found, at most `limit`
    solutions: np.ndarray  # uint8 [N, S], the first one; zeros where there is none
    guesses: np.ndarray  # int32 [N]


def _compiled(function: Any) -> Any:
    return njit(cache=True, nogil=True)(function) if COMPILED else function


def _native(array: np.ndarray) -> Any:
    return array if COMPILED else array.tolist()


@lru_cache
def _tables(box: Box) -> tuple[Any, Any]:
    """Cells of each unit uint8 [3n, n], and the cells that share a unit with each cell uint8 [S, P].

    Unsigned, because numba tests every signed index for being negative, which the inner loops feel.
    """
    units = unit_cells(box).reshape(-1, box[0] * box[1])
    shares = np.zeros((units.max() + 1,) * 2, bool)
    for unit in units:
        shares[np.ix_(unit, unit)] = True
    np.fill_diagonal(shares, False)
    peers = np.nonzero(shares)[1].reshape(len(shares), -1)
    return _native(units.astype(np.uint8)), _native(peers.astype(np.uint8))


@_compiled
def _mix(z):
    z = ((z ^ (z >> S30)) * MIX_1) & MASK
    z = ((z ^ (z >> S27)) * MIX_2) & MASK
    return z ^ (z >> S31)


@_compiled
def _random_below(rng, limit):
    """From the state `rng` uint64 [1], so that each attempt owns its random numbers."""
    rng[0] = (rng[0] + GOLDEN) & MASK
    return INT(_mix(rng[0]) >> S33) % limit


@_compiled
def _propagate(state, queue, size, units, peers):
    """Naked and hidden singles to a fixed point, False if there is none; `queue[:size]` just became single."""
    full = (1 << len(units[0])) - 1
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


@_compiled
def _popcount(mask):
    number = 0
    while mask:
        mask &= mask - 1
        number += 1
    return number


@_compiled
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
            score = _random_below(rng, 1 << 20)
        else:
            for peer in peers[cell]:
                score += (state[peer] & mask) != 0
        if number < fewest or score > top:
            best, fewest, top = cell, number, score
    return best


@_compiled
def _branch_bit(mask, rng):
    """The lowest candidate, or with an `rng` a random one."""
    if len(rng):
        for _ in range(_random_below(rng, _popcount(mask))):
            mask &= mask - 1
    return mask & -mask


@_compiled
def _answers(start, units, peers, limit, max_guesses, rng):
    """The first `limit` solutions as states, and the number of guesses: `max_guesses` + 1 if it gave up."""
    answers, guesses = [start][:0], 0
    queue, size = start.copy(), 0  # room for every cell
    for cell in range(len(start)):
        if start[cell] & (start[cell] - 1) == 0:
            queue[size] = cell
            size += 1
    waiting = [(start.copy(), -1)]  # states to look at, each with the cell that changed last
    while waiting and len(answers) < limit:
        state, cell = waiting.pop()
        if cell >= 0:
            queue[0] = cell
            size = 1 if state[cell] & (state[cell] - 1) == 0 else 0
        if not _propagate(state, queue, size, units, peers):
            continue
        cell = _branch_cell(state, peers, rng)
        if cell < 0:
            answers.append(state)
            continue
        guesses += 1
        if guesses > max_guesses:
            break
        guess = state.copy()
        guess[cell] = _branch_bit(state[cell], rng)
        state[cell] ^= guess[cell]  # what is left to try when the guess is refuted
        waiting.append((state, cell))
        waiting.append((guess, cell))
    return answers, guesses


@_compiled
def _search(start, units, peers, limit, max_guesses, rng):
    """Solutions found (up to `limit`; -1 if out of guesses), guesses, and the first solution if there is one."""
    answers, guesses = _answers(start, units, peers, limit, max_guesses, rng)
    found = len(answers) if guesses <= max_guesses else -1
    return found, min(guesses, max_guesses), answers[0] if len(answers) else start


@_compiled
def _solve_batch(states, units, peers, limit, no_rng, counts, guesses):
    """Puts each state's first solution in its place."""
    for i in range(len(states)):
        counts[i], guesses[i], states[i][:] = _search(states[i], units, peers, limit, UNLIMITED, no_rng)


def solve_batch(puzzles: np.ndarray, box: Box = (3, 3), limit: int = 2) -> Solved:
    """Counts solutions of uint8 [N, S] puzzles up to `limit`; a count of 1 with limit 2 proves uniqueness."""
    full = 2 ** (box[0] * box[1]) - 1
    states = _native(_to_masks(puzzles, full))
    counts, guesses = (_native(np.zeros(len(puzzles), np.int32)) for _ in range(2))
    _solve_batch(states, *_tables(box), limit, _native(np.zeros(0, np.uint64)), counts, guesses)
    solved = np.asarray(counts, np.int32)
    solutions = _to_digits(np.asarray(states).reshape(puzzles.shape), full)
    return Solved(solved, np.where(solved[:, None] > 0, solutions, np.uint8(0)), np.asarray(guesses, np.int32))


def _to_masks(puzzles: np.ndarray, full: int) -> np.ndarray:
    return np.where(puzzles > 0, 1 << np.maximum(puzzles.astype(np.int32) - 1, 0), full).astype(np.int32)


def _to_digits(states: Any, full: int) -> np.ndarray:
    """Of masks with one candidate; 0 for those with all."""
    masks = np.asarray(states)
    return np.where(masks == full, 0, np.frexp(masks)[1]).astype(np.uint8)


@_compiled
def _shuffle(order, rng):
    for i in range(len(order) - 1, 0, -1):
        j = _random_below(rng, i + 1)
        order[i], order[j] = order[j], order[i]


@_compiled
def _make(blank, seed, attempt, rng, no_rng, units, peers, fewest, most):
    """A puzzle and its answer as states, and its rating; -1 marks an attempt given up."""
    rng[0] = _mix((_mix(seed ^ SEED) + attempt) & MASK)
    found, _, answer = _search(blank, units, peers, 1, MAX_GUESSES, rng)
    if found != 1:
        return blank, blank, -1
    puzzle, order = answer.copy(), list(range(len(blank)))
    _shuffle(order, rng)
    for cell in order:
        # A clue may go if and only if no solution has another digit in its cell.
        other = puzzle.copy()
        other[cell] = blank[cell] ^ answer[cell]
        found, _, _ = _search(other, units, peers, 1, MAX_GUESSES, no_rng)
        if found < 0:
            return blank, blank, -1
        if found == 0:
            puzzle[cell] = blank[cell]
    missing = fewest
    for cell in order:
        missing -= puzzle[cell] != blank[cell]
    _shuffle(order, rng)
    if most > fewest:
        missing += _random_below(rng, most - fewest + 1)
    for cell in order:
        if missing > 0 and puzzle[cell] == blank[cell]:
            puzzle[cell] = answer[cell]
            missing -= 1
    _, guesses, _ = _search(puzzle, units, peers, 2, UNLIMITED, no_rng)
    return puzzle, answer, guesses


def generate_batch(
    box: Box, seed: int, first: int, num: int, clues: Clues = (0, 0)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Puzzles, answers and ratings of attempts first..first+num-1; rating -1 marks one given up on.

    `clues`: each minimal puzzle is filled up to a number drawn between these two, if it has fewer.
    """
    full = 2 ** (box[0] * box[1]) - 1
    blank = _native(np.full((box[0] * box[1]) ** 2, full, np.int32))
    rng, no_rng = _native(np.zeros(1, np.uint64)), _native(np.zeros(0, np.uint64))
    made = [
        _make(blank, UINT(seed % 2**64), UINT(attempt), rng, no_rng, *_tables(box), *clues)
        for attempt in range(first, first + num)
    ]
    puzzles, answers, ratings = zip(*made, strict=True)
    return _to_digits(puzzles, full), _to_digits(answers, full), np.array(ratings, np.int32)


@_compiled
def _open_cells(state):
    number = 0
    for cell in range(len(state)):
        number += state[cell] & (state[cell] - 1) != 0
    return number


@_compiled
def _open_after_trials(puzzle, units, peers, least):
    """Cells that stay open once every digit is gone whose trial, followed by singles, contradicts the rules; once there
    are fewer than `least`, as many as are open then.

    In the hardest puzzles nearly all: there one has to try two digits at a time.
    """
    state, queue, size = puzzle.copy(), puzzle.copy(), 0
    for cell in range(len(state)):
        if state[cell] & (state[cell] - 1) == 0:
            queue[size] = cell
            size += 1
    possible = _propagate(state, queue, size, units, peers)
    changed = True
    while possible and changed and _open_cells(state) >= least:
        changed = False
        for cell in range(len(state)):
            bits = state[cell]
            while bits:
                bit = bits & -bits
                bits ^= bit
                if state[cell] & bit == 0 or state[cell] == bit:
                    continue
                guess = state.copy()
                guess[cell], queue[0] = bit, cell
                if _propagate(guess, queue, 1, units, peers):
                    continue
                state[cell] ^= bit
                size = 1 if state[cell] & (state[cell] - 1) == 0 else 0
                queue[0] = cell
                possible = _propagate(state, queue, size, units, peers)
                changed = True
    return _open_cells(state)


def open_after_trials(puzzles: np.ndarray, box: Box = (3, 3)) -> np.ndarray:
    """Of uint8 [N, S] puzzles: cells that singles and trials of one digit at a time do not fill; int32 [N]."""
    masks = _native(_to_masks(puzzles, 2 ** (box[0] * box[1]) - 1))
    return np.array([_open_after_trials(mask, *_tables(box), 0) for mask in masks], np.int32)


@_compiled
def _deciding_pairs(puzzle, answers, full):
    """Clues in two open cells, as (cell, mask, cell, mask), that just one of the answers has.

    It looks at pairs of sets of answers, some words each, until a second answer is in both: mostly after a few words.
    """
    side, clues, pairs = _popcount(full), [(0, 0)][:0], [(0, 0, 0, 0)][:0]
    has = np.zeros((len(puzzle), side, 1 + len(answers) // WORD), np.int64)  # a bit for each answer
    for i in range(len(answers)):
        answer, word, bit = answers[i], i // WORD, 1 << i % WORD
        for cell in range(len(puzzle)):
            has[cell, _popcount(answer[cell] - 1), word] |= bit
    for cell in range(len(puzzle)):
        for digit in range(side):
            if puzzle[cell] == full and has[cell, digit].any():
                clues.append((cell, digit))
    for i in range(len(clues)):
        first = has[clues[i]]
        for j in range(i):
            second, number = has[clues[j]], 0
            for word in range(len(first)):
                both = first[word] & second[word]
                if both:
                    number += 1 if both & (both - 1) == 0 else 2
                    if number > 1:
                        break
            if number == 1:
                pairs.append((clues[i][0], 1 << clues[i][1], clues[j][0], 1 << clues[j][1]))
    return pairs


@_compiled
def _agree(puzzle, other, cells):
    same = 0
    while same < len(cells) and puzzle[cells[same]] == other[cells[same]]:
        same += 1
    return same == len(cells)


@_compiled
def _among(puzzle, others, number, cells):
    i = 0
    while i < number and not _agree(puzzle, others[i], cells):
        i += 1
    return i < number


@_compiled
def _wander(full, seed, attempts, rng, no_rng, units, peers, made, answers, ratings):
    """Makes puzzles of the first of `made`, and of those that were made, with at least half of its guesses and nine
    tenths as many cells open after trials. How many there are then with the first; no two are the same.

    An attempt takes two random clues away, or one if there are too many answers then, and finds all answers, up to
    thousands: two clues that just one of them has make a puzzle. There are hundreds of such pairs, few of which make
    a hard one.
    """
    rng[0] = _mix(seed ^ SEED)
    start, order, number = made[0].copy(), list(range(len(made[0]))), 1
    _, hard, _ = _search(start, units, peers, 2, UNLIMITED, no_rng)
    least = (9 * _open_after_trials(start, units, peers, 0) + 9) // 10
    for _ in range(attempts):
        if number == len(made):
            break
        parent = made[number - 1 - _random_below(rng, (number + 1) // 2)]  # of the later half, to get away
        _shuffle(order, rng)
        puzzle, taken = parent.copy(), [cell for cell in order if parent[cell] != full][:TAKEN]
        for cell in taken:
            puzzle[cell] = full
        found, _ = _answers(puzzle, units, peers, MOST_ANSWERS, UNLIMITED, no_rng)
        if len(found) == MOST_ANSWERS:  # as in a puzzle of 17 clues
            cell = taken.pop()
            puzzle[cell] = parent[cell]
            found, _ = _answers(puzzle, units, peers, MOST_ANSWERS, UNLIMITED, no_rng)
        if len(found) == MOST_ANSWERS:
            continue
        pairs, last = _deciding_pairs(puzzle, found, full), min(number + FROM_EACH, len(made))
        _shuffle(pairs, rng)
        for first, first_bit, second, second_bit in pairs:
            if number == last:
                break
            other = puzzle.copy()
            other[first], other[second] = first_bit, second_bit
            if _agree(other, parent, taken):  # a clue more, or none, is no other puzzle
                continue
            _, rating, answer = _search(other, units, peers, 2, UNLIMITED, no_rng)
            if 2 * rating < hard or _among(other, made, number, order):
                continue
            if _open_after_trials(other, units, peers, least) >= least:
                made[number][:], answers[number][:], ratings[number] = other, answer, rating
                number += 1
    return number


def wander(question: np.ndarray, box: Box, seed: int, most: int, attempts: int) -> tuple[np.ndarray, ...]:
    """Puzzles uint8 [N, S] near this one and about as hard, their answers, and their ratings: at most so many, from so
    many attempts. Each has all but one or two clues of this one, or of one before it; some may be symmetric copies."""
    full = 2 ** (box[0] * box[1]) - 1
    shape = (1 + most, len(question))
    puzzles = np.zeros(shape, np.int32)
    puzzles[0] = _to_masks(question, full)
    made, found, counted = _native(puzzles), _native(np.zeros(shape, np.int32)), _native(np.zeros(1 + most, np.int32))
    rng, no_rng = _native(np.zeros(1, np.uint64)), _native(np.zeros(0, np.uint64))
    number = _wander(full, UINT(seed % 2**64), attempts, rng, no_rng, *_tables(box), made, found, counted)
    questions, solved = (_to_digits(masks, full)[1:number] for masks in (made, found))
    return questions, solved, np.asarray(counted, np.int32)[1:number]
