"""Right or wrong: each run by its end, and the table of all."""

import collections
import json
import os
import platform
import statistics
from pathlib import Path

import numpy as np
from bench import Fault, Result, Victim, read_checkpoints
from kinds import MEANINGS


def judge(victim: Victim, reference: dict[str, np.ndarray]) -> None:
    """Compare the end of a run with that of one that nothing disturbed."""
    from tinypod.health import goodput

    result, last = victim.result, victim.bench.steps
    state, steps, result.bad_checkpoints = read_checkpoints(victim.target)
    result.checkpoints = len(steps)
    wrong = [name for name in reference if name not in state or not same_bits(state[name], reference[name])]
    if steps[-1:] != [last]:
        result.why = f"its last checkpoint is not of step {last}: {steps}"
    elif wrong or state.keys() != reference.keys():
        result.why = f"{len(wrong)} arrays differ from the reference's: {', '.join(wrong[:3])}"
    elif [row["step"] for row in victim.rows()] != list(range(1, last + 1)):
        counts = collections.Counter(row["step"] for row in victim.rows())
        missing = [step for step in range(1, last + 1) if step not in counts]
        doubled = [step for step, count in counts.items() if count > 1]
        result.why = f"metrics.jsonl: missing {missing[:5]}, doubled {doubled[:5]}, or out of order"
    result.right = not result.why
    summary = goodput.summarise(victim.folder)
    result.attempts, result.goodput = summary.attempts, summary.goodput


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def read_results(path: Path) -> list[Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    results = []
    for line in lines:
        values = json.loads(line)
        results.append(Result(**(values | {"faults": [Fault(**fault) for fault in values["faults"]]})))
    return results


def table(results: list[Result]) -> str:
    """Markdown; a run counts in the row of each kind of fault that it suffered."""
    columns: tuple[str, ...] = ("fault", "faults", "runs", "right at the end", "bad checkpoints", "by hand")
    columns += ("steps lost, mean", "max", "restart s, median", "max", "goodput")
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    groups: dict[str, list[tuple[Result, Fault]]] = collections.defaultdict(list)
    for result in results:
        for fault in result.faults:
            where = f" ({result.processes} processes)" if result.processes > 1 else ""
            groups[MEANINGS[fault.kind] + where].append((result, fault))
    everything = [pair for pairs in groups.values() for pair in pairs]
    for name, pairs in [*sorted(groups.items()), ("**all**", everything)]:
        lines.append(f"| {name} | {' | '.join(_figures(pairs))} |")
    return "\n".join(lines)


def _figures(pairs: list[tuple[Result, Fault]]) -> list[str]:
    runs = list({result.name: result for result, _ in pairs}.values())
    lost = [fault.lost_steps for _, fault in pairs]
    restarts = [fault.restart_s for _, fault in pairs if fault.restart_s is not None]
    return [
        str(len(pairs)),
        str(len(runs)),
        str(sum(run.right for run in runs)),
        f"{sum(len(run.bad_checkpoints) for run in runs)} of {sum(run.checkpoints for run in runs)}",
        str(sum(bool(run.hand) for run in runs)),
        f"{statistics.mean(lost):.1f}",
        str(max(lost)),
        f"{statistics.median(restarts):.1f}" if restarts else "–",
        f"{max(restarts):.1f}" if restarts else "–",
        f"{statistics.mean(run.goodput for run in runs):.0%}",
    ]


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"
