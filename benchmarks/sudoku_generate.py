"""Minimal Sudoku puzzles a minute, and microseconds a proof of uniqueness, on one core.

    python benchmarks/sudoku_generate.py [--count 2000] [--csv hard.csv]

Proofs are timed on the puzzles just made, or on those of a CSV file (harder lists take longer).
"""

import argparse
import datetime
import platform
import time
from pathlib import Path

from tinypod.data import sudoku_csv, sudoku_generator, sudoku_solver


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="puzzles to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="time proofs on this file's questions")
    args = parser.parse_args()

    sudoku_generator.generate((3, 3), 10, args.seed)  # compiles, or loads what was compiled before
    start = time.perf_counter()
    puzzles = sudoku_generator.generate((3, 3), args.count, args.seed)
    per_minute = 60 * args.count / (time.perf_counter() - start)

    questions = sudoku_csv.read_csv(args.csv).questions if args.csv else puzzles.questions
    sudoku_solver.solve_batch(questions[:10])
    start = time.perf_counter()
    solved = sudoku_solver.solve_batch(questions)
    proof_us = 1e6 * (time.perf_counter() - start) / len(questions)

    proven = args.csv.name if args.csv else "generated"
    print("| date | hardware | minimal 9x9 puzzles/min | proofs of | puzzles | guesses | us/proof |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {datetime.date.today()} | {hardware()}, 1 core | {per_minute:,.0f} | {proven} | {len(questions)} "
        f"| {solved.guesses.mean():.1f} | {proof_us:.1f} |"
    )


if __name__ == "__main__":
    main()
