"""More hard puzzles from few: others with the same answers, made of them by exchanging clues.

Few of the puzzles that one could make up are hard. A hard one with one clue or two taken away, and others given until
its answer is the only one again, often is. Nothing but the puzzle, its answer and the rules of Sudoku goes into it.

Importing this module imports numba, which is slow: import it inside functions.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinypod.data.sudoku import Box, Progress, Puzzles, signatures
from tinypod.data.sudoku_solver import wander

ATTEMPTS = 60  # for each variant that is asked for: a hard puzzle gives a new one in some 50 to 200
STEPS = 8  # of a walk, for each variant: it comes back to puzzles where it was before


def make_variants(
    puzzles: Puzzles, box: Box, most: int, seed: int, avoid: np.ndarray, progress: Progress | None = None
) -> Puzzles:
    """Up to `most` variants of each puzzle, with one solution, at least half its rating and as many clues or more; no
    two, nor one and a puzzle, with the same signature, and none with a signature of `avoid`, uint64 [N].

    A puzzle's own depend on it, the seed and `most`, not on the puzzles beside it, but for those that are left out.
    """

    def make(row: int) -> tuple[np.ndarray, np.ndarray]:
        question, answer = puzzles.questions[row], puzzles.answers[row]
        digest = hashlib.sha256((seed % 2**64).to_bytes(8, "little") + question.tobytes()).digest()
        walk_seed = int.from_bytes(digest[:8], "little")
        found, ratings = wander(question, answer, box, walk_seed, STEPS * most, ATTEMPTS * most)
        _, first = np.unique(signatures(found, box), return_index=True)
        kept = np.sort(first)[:most]
        return found[kept], ratings[kept]

    made = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compiled, the solver holds no lock
        for found in pool.map(make, range(len(puzzles.questions))):
            made.append(found)
            if progress:
                progress(1)
    questions, ratings = (np.concatenate(column) for column in zip(*made, strict=True))
    rows = np.repeat(np.arange(len(made)), [len(found) for found, _ in made])
    marks = signatures(questions, box)
    first = np.zeros(len(marks), bool)
    first[np.unique(marks, return_index=True)[1]] = True
    new = first & ~np.isin(marks, np.concatenate([signatures(puzzles.questions, box), avoid]))
    sources = [f"{puzzles.sources[row]}_variant" for row in rows[new]]
    return Puzzles(questions[new], puzzles.answers[rows[new]], sources, ratings[new])
