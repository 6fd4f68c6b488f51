"""Break runs on purpose, at random moments, and judge each by its end.

    python benchmarks/faults --faults 190 --jobs 4            # about half an hour on two cores; --jobs 12 on sixteen
    python benchmarks/faults --kinds kill,sigterm --faults 6  # a minute or two
    python benchmarks/faults --table                          # once more from the results that are there

Every run is the real command with `--supervise`, on a tiny model and puzzles made up here. It suffers several faults,
each at a random step (the seed decides which), and must come to its end with nothing but the same command: by itself,
or started again where the fault took the supervisor, too, or ended the run as asked (SIGTERM). Then

- the last checkpoint must equal, to the bit, that of a run which nothing disturbed (same config, same mesh; for NaN
  batches: one that was told from the beginning to leave them out),
- `metrics.jsonl` must have every step once, and only once,
- every checkpoint in the folder must restore, with the right checksums.

A step is lost if it was in `metrics.jsonl` when the fault came and had to be done again. Restart time is from the fault
to the first new step. Each finished run is a line in `OUT/results.jsonl`; the same command goes on after the last one.

`bench.py`: the runs, and what they share. `kinds.py`: the faults. `judge.py`: right or wrong, and the table.
"""

import argparse
import contextlib
import datetime
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from bench import Bench, NeedsAHand, Result, Victim, poison, small_disk
from judge import hardware, judge, read_results, table
from kinds import KINDS, Kind, full_disk, left_out, of, planned, random_moments, rollbacks
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

console = Console()


def run_through(bench: Bench, name: str) -> Result:
    """One run with its faults, from its start to the judgement."""
    kind, began = of(name), time.monotonic()
    with contextlib.ExitStack() as stack:
        if kind.remote:
            stack.enter_context(bench.one_at_a_time)  # the store refuses everybody
            bench.store()
        victim = Victim(bench, name, kind.processes, *kind.overrides, remote=kind.remote)
        shutil.rmtree(victim.folder, ignore_errors=True)  # of a try that was interrupted
        if kind.inject is full_disk:
            stack.enter_context(small_disk(victim.disk))
        stack.callback(victim.end)
        try:
            suffer(victim, kind)
        except NeedsAHand as why:
            victim.result.hand = str(why)
        except Exception as error:  # of this program itself: it counts against the run until somebody has looked
            victim.result.why = f"{type(error).__name__}: {error}"
        if victim.result.right and not victim.result.bad_checkpoints:
            shutil.rmtree(victim.folder)
        elif kind.inject is full_disk:
            shutil.copytree(victim.folder, bench.out / "failed" / name, dirs_exist_ok=True)
    victim.result.seconds = time.monotonic() - began
    return victim.result


def suffer(victim: Victim, kind: Kind) -> None:
    moments = random_moments(victim.random, victim.bench.steps, victim.bench.a_run or kind.faults)
    skipped = poison(victim, moments) if kind.inject is None else ()
    victim.start()
    for moment in moments if kind.inject is not None else []:
        if not victim.comes_to(moment):
            break
        assert kind.inject is not None
        kind.inject(victim)
    victim.finish()
    if kind.inject is None:
        victim.result.faults = rollbacks(victim)
    judge(victim, victim.bench.reference(kind.processes, skipped))


def run_all(bench: Bench, names: list[str], jobs: int, results_path: Path) -> None:
    done = {result.name for result in read_results(results_path)}
    left = [name for name in names if name not in done]
    mixed = len({of(name).processes > 1 for name in left}) == 2
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, pools(bench, jobs, mixed) as (alone, clusters):
        task = progress.add_task("runs", total=len(names), completed=len(names) - len(left))
        futures = [(clusters if of(name).processes > 1 else alone).submit(run_through, bench, name) for name in left]
        for future in as_completed(futures):
            result = future.result()
            with results_path.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            progress.advance(task)
            lost = sum(fault.lost_steps for fault in result.faults)
            verdict = "[green]right[/]" if result.right else f"[red]wrong[/] {escape(result.hand or result.why)}"
            progress.console.print(
                f"{result.name}: {len(result.faults)} faults, {lost} steps lost, {result.attempts} attempts, "
                f"{result.seconds:.0f} s: {verdict}{escape(' '.join(result.bad_checkpoints))}",
                soft_wrap=True,
            )


@contextlib.contextmanager
def pools(bench: Bench, jobs: int, mixed: bool) -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
    """For runs of one process, and for clusters, which get a quarter of the jobs.

    An interrupt ends the runs under way; they are done again next time.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for_clusters = max(1, jobs // 4) if mixed and jobs > 1 else 0
    alone = ThreadPoolExecutor(jobs - for_clusters)
    clusters = ThreadPoolExecutor(for_clusters) if for_clusters else alone
    try:
        yield alone, clusters
    except BaseException:
        bench.stopping.set()
        raise
    finally:
        for pool in (alone, clusters):
            pool.shutdown(cancel_futures=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--faults", type=int, default=200, help="in all, shared out over the kinds; at least one run of each"
    )
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--a-run", type=int, help="faults in each run; default: three to five, by their kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of them, with commas; default: all")
    parser.add_argument("--seed", type=int, default=0, help="decides the moments")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="for results, runs and what they print")
    parser.add_argument("--table", action="store_true", help="only print the table of the results that are there")
    arguments = parser.parse_args()
    results_path, without_path = (arguments.out.absolute() / name for name in ("results.jsonl", "left_out.json"))
    if not arguments.table:
        kinds = arguments.kinds.split(",")
        if unknown := set(kinds) - set(KINDS):
            parser.error(f"--kinds: {', '.join(sorted(unknown))}: expected some of {', '.join(KINDS)}")
        bench = Bench(arguments.out.absolute(), arguments.steps, arguments.a_run)
        without = left_out(kinds, bench.out)
        without_path.write_text(json.dumps(without))
        kinds = [kind for kind in kinds if kind not in without]
        if not kinds:
            sys.exit(f"nothing is left to do: {without}")
        names = planned(kinds, arguments.faults, arguments.seed, arguments.a_run)
        try:
            run_all(bench, names, arguments.jobs, results_path)
        finally:
            bench.close()
    results = read_results(results_path)
    print(
        f"{datetime.date.today()}, {hardware()}, {sum(result.seconds for result in results) / 60:.0f} minutes of runs\n"
    )
    print(table(results))
    for kind, why in json.loads(without_path.read_text()).items() if without_path.exists() else ():
        print(f"\nleft out: {kind} ({why})")
    failed = [result for result in results if not result.right or result.bad_checkpoints]
    for result in failed:
        print(f"\n{result.name}: {result.hand or result.why} {' '.join(result.bad_checkpoints)}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
