"""Does training in bfloat16 learn as fast here as in the TRM authors' code? Many seeds of a small model on each side,
and the step at which each run solves 10 and 50 % of its held-out puzzles.

    python benchmarks/bf16_parity.py FOLDER --authors CHECKOUT --seeds 8

CHECKOUT is the authors' repository (their model and loss; needs torch and einops). Both sides train on the same
puzzles, each once before any comes again, with the same recipe, and are scored on the same held-out ones with live
weights, every `--every` steps. Sides: `authors`; `tinypod`; `random`, as tinypod but drawing with replacement; `plain`,
as tinypod without fused kernels; `float32`. Each run is a process; `--at-once` of them share the device. A run that has
ended is not run again: stop it and start it again as you like, with the same options. FOLDER gets the puzzles, the
curves, and `table.md`. `--small` is a model and puzzles for a CPU, to try the program: all sides in float32 then.
"""

import argparse
import datetime
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinypod.data import puzzles, sudoku

TARGETS = (0.1, 0.5)
SIDES = {
    "tinypod": [],
    "random": ["data.sampling=random"],
    "plain": ["model.fused=false"],
    "float32": ["model.dtype=float32"],
}


@dataclass(frozen=True)
class Recipe:
    """Both sides', in one place."""

    box: tuple[int, int] = (3, 3)
    clues: int = 34
    width: int = 256
    cycles: tuple[int, int] = (2, 3)  # H, L
    expansion: float = 4.0
    halt_steps: int = 8
    batch: int = 256
    steps: int = 3000
    rate: float = 1e-3
    decay: float = 0.1
    warmup: int = 200
    betas: tuple[float, float] = (0.9, 0.95)
    puzzle_positions: int = 16
    dtype: str = "bfloat16"


SMALL = Recipe(
    dtype="float32",
    box=(2, 2),
    clues=7,
    width=32,
    cycles=(1, 1),
    halt_steps=4,
    batch=64,
    steps=300,
    rate=4e-3,
    warmup=20,
)


def make_data(folder: Path, recipe: Recipe) -> Path:
    data = folder / "data"
    if not (data / "dataset.json").exists():
        box = f"{recipe.box[0]}x{recipe.box[1]}"
        sizes = [
            "--train-size",
            "1000" if recipe.box == (3, 3) else "100",
            "--test-size",
            "512" if recipe.box == (3, 3) else "64",
        ]
        command = ["data", "sudoku", str(data), "--generate", "--box", box, "--clues", str(recipe.clues), *sizes]
        subprocess.run([sys.executable, "-m", "tinypod", *command], check=True)
    return data


def train_ours(folder: Path, side: str, seed: int, recipe: Recipe, every: int) -> list[tuple[int, float]]:
    import tinypod

    H, L = recipe.cycles
    overrides = [
        f"seed={seed}",
        f"steps={recipe.steps}",
        f"batch_size={recipe.batch}",
        "ema_decay=null",
        f"data.path={folder / 'data'}",
        "data.augmentations=endless",
        "data.sampling=epochs",
        f"model.hidden_size={recipe.width}",
        f"model.H_cycles={H}",
        f"model.L_cycles={L}",
        f"model.expansion={recipe.expansion}",
        f"model.dtype={recipe.dtype}",
        f"model.puzzle_embedding={{kind: table, width: {recipe.width}, length: {recipe.puzzle_positions}}}",
        f"task.halting.max_steps={recipe.halt_steps}",
        f"optimizer.learning_rate={recipe.rate}",
        f"optimizer.weight_decay={recipe.decay}",
        f"optimizer.beta1={recipe.betas[0]}",
        f"optimizer.beta2={recipe.betas[1]}",
        f"optimizer.schedule.warmup_steps={recipe.warmup}",
        f"optimizer.tables={{learning_rate: {recipe.rate}, weight_decay: {recipe.decay}}}",
        f"eval={{every_steps: {every}, weights: live, limit: null}}",
        "checkpoint={every_steps: 1000000, every_minutes: null}",
        *SIDES[side],
    ]
    model = tinypod.train("trm/sudoku_mlp", overrides, run=folder / "runs" / f"{side}_{seed}")
    rows = [row for row in model.metrics if "eval/exact_accuracy" in row]
    return [(int(row["step"]), row["eval/exact_accuracy"]) for row in rows]


def train_theirs(
    folder: Path, checkout: Path, seed: int, recipe: Recipe, every: int, device: str
) -> Iterator[tuple[int, float]]:
    import torch

    sys.path.insert(0, str(checkout))
    losses = importlib.import_module("models.losses")
    trm = importlib.import_module("models.recursive_reasoning.trm")

    torch.manual_seed(seed)
    random, info = np.random.default_rng(seed), puzzles.read_info(folder / "data")
    B, side = recipe.batch, sudoku.side_of(recipe.box)

    def load(split: str) -> list[Any]:
        found = puzzles.read_split(folder / "data", info, split)
        return [torch.tensor(x.astype(np.int32), device=device) for x in (found.inputs, found.labels)]

    (questions, answers), held_out = load("train"), load("test")
    config = {
        "batch_size": B,
        "seq_len": info.seq_len,
        "vocab_size": info.vocab_size,
        "num_puzzle_identifiers": 1,
        "puzzle_emb_ndim": recipe.width,
        "puzzle_emb_len": recipe.puzzle_positions,
        "H_cycles": recipe.cycles[0],
        "L_cycles": recipe.cycles[1],
        "H_layers": 0,
        "L_layers": 2,
        "hidden_size": recipe.width,
        "expansion": recipe.expansion,
        "num_heads": 8,
        "pos_encodings": "none",
        "mlp_t": True,
        "halt_max_steps": recipe.halt_steps,
        "halt_exploration_prob": 0.1,
        "no_ACT_continue": True,
        "forward_dtype": recipe.dtype,
        "causal": False,
    }
    with torch.device(device):
        model = losses.ACTLossHead(trm.TinyRecursiveReasoningModel_ACTV1(config), "stablemax_cross_entropy")
    call = torch.compile(model, dynamic=False) if torch.device(device).type == "cuda" else model
    weights = [p for p in model.parameters() if p.requires_grad]
    moments = [[torch.zeros_like(p) for p in weights] for _ in range(2)]
    beta1, beta2 = recipe.betas
    table = model.model.inner.puzzle_emb
    blank = {"puzzle_identifiers": torch.zeros(B, dtype=torch.int32, device=device)}

    def update(rate: float, step: int) -> None:
        for p, m, v in zip(weights, *moments, strict=True):
            m.lerp_(p.grad, 1 - beta1)
            v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            p.mul_(1 - rate * recipe.decay)
            p.sub_(rate * torch.atan2(m / (1 - beta1**step), (v / (1 - beta2**step)).sqrt()))
            p.grad = None
        direction = torch.sign(table.local_weights.grad.sum(0, keepdim=True))  # all rows have the one identifier
        table.weights.mul_(1 - rate * recipe.decay).sub_(rate * direction)
        table.local_weights.grad = None

    def lines(n: int, of: int, inside: int) -> Any:
        """Rows in an order that keeps groups of `inside` together, [n, of · inside]."""
        outer = torch.rand(n, of, device=device).argsort(1)
        inner = torch.rand(n, of, inside, device=device).argsort(2)
        return (outer[:, :, None] * inside + inner).reshape(n, side)

    def view(rows: Any) -> tuple[Any, Any]:
        n, (height, breadth) = len(rows), recipe.box
        kept = torch.arange(2, device=device).expand(n, 2)
        digits = torch.cat([kept, torch.rand(n, side, device=device).argsort(1) + 2], 1).int()
        cells = lines(n, breadth, height)[:, :, None] * side + lines(n, height, breadth)[:, None, :]
        if height == breadth:
            turned = torch.rand(n, 1, 1, device=device) < 0.5
            cells = torch.where(turned, cells.transpose(1, 2), cells)
        cells = cells.reshape(n, -1)
        question, answer = (digits.gather(1, x[rows].gather(1, cells).long()) for x in (questions, answers))
        return question, answer

    def solved() -> float:
        model.eval()
        right = 0
        with torch.inference_mode():
            for start in range(0, len(held_out[0]), B):
                part = torch.arange(start, start + B, device=device) % len(held_out[0])
                batch = {"inputs": held_out[0][part], "labels": held_out[1][part], **blank}
                with torch.device(device):
                    carry = model.initial_carry(batch)
                for _ in range(recipe.halt_steps):
                    carry, _, _, out, _ = call(carry=carry, batch=batch, return_keys=["preds"])
                here = min(B, len(held_out[0]) - start)
                right += int((out["preds"] == batch["labels"]).all(1)[:here].sum())
        model.train()
        return right / len(held_out[0])

    epochs = recipe.steps * B // len(questions) + 2
    stream = np.concatenate([random.permutation(len(questions)) for _ in range(epochs)])
    model.train()
    carry = None
    for step in range(1, recipe.steps + 1):
        question, answer = view(torch.as_tensor(stream[(step - 1) * B : step * B], device=device))
        batch = {"inputs": question, "labels": answer, **blank}
        if carry is None:
            with torch.device(device):
                carry = model.initial_carry(batch)
        carry, loss, _, _, _ = call(carry=carry, batch=batch, return_keys=[])
        (loss / B).backward()
        with torch.no_grad():
            update(recipe.rate * min(1.0, step / recipe.warmup), step)
        if step % every == 0 or step == recipe.steps:
            yield step, solved()


def reached(curve: list[tuple[int, float]], target: float) -> float:
    """The step at which a line through the scores first is at the target; infinite where it never is."""
    before = (0, 0.0)
    for step, share in curve:
        if share >= target:
            return before[0] + (step - before[0]) * (target - before[1]) / (share - before[1])
        before = (step, share)
    return math.inf


def compare(ours: list[float], theirs: list[float]) -> str:
    """The ratio of the steps, as geometric means, with a 95 % interval (Welch's t on the logarithms)."""
    from scipy import stats

    if not np.isfinite([*ours, *theirs]).all():
        return "a run never got there"
    a, b = np.log(ours), np.log(theirs)
    spread = [x.var(ddof=1) / len(x) for x in (a, b)]
    freedom = sum(spread) ** 2 / sum(s**2 / (len(x) - 1) for s, x in zip(spread, (a, b), strict=True))
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(spread))
    middle = a.mean() - b.mean()
    low, mid, high = (math.exp(x) for x in (middle - half, middle, middle + half))
    return f"{mid:.2f} ({low:.2f} to {high:.2f})"


def make_table(folder: Path, sides: list[str], seeds: int) -> str:
    def curves(side: str) -> list[list[tuple[int, float]]]:
        files = [folder / f"{side}_{seed}.json" for seed in range(seeds)]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    found = {side: curves(side) for side in sides}
    lines = ["| side | runs | " + " | ".join(f"steps to {t:.0%} | over the authors'" for t in TARGETS) + " | end |"]
    lines.append("|---" * (3 + 2 * len(TARGETS)) + "|")
    for side, runs in found.items():
        cells = []
        for target in TARGETS:
            steps = [reached(run, target) for run in runs]
            cells.append(" ".join(f"{s:.0f}" for s in sorted(steps)))
            theirs = [reached(run, target) for run in found.get("authors", [])]
            known = side != "authors" and min(len(steps), len(theirs)) > 1
            cells.append(compare(steps, theirs) if known else "")
        ends = " ".join(f"{run[-1][1]:.1%}" for run in runs)
        lines.append(f"| {side} | {len(runs)} | {' | '.join(cells)} | {ends} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--authors", type=Path, help="their checkout")
    parser.add_argument("--sides", nargs="+", default=["authors", "tinypod", "random", "plain"])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds after which no further run begins")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--clues", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda", help="of the authors' code")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # side:seed, in a process of its own
    options = parser.parse_args()
    changes = {key: value for key in ("steps", "clues") if (value := getattr(options, key)) is not None}
    recipe = Recipe(**vars(SMALL if options.small else Recipe()) | changes)
    if options.one:
        side, seed = options.one.split(":")
        if side == "authors":
            curve = list(
                train_theirs(options.folder, options.authors, int(seed), recipe, options.every, options.device)
            )
        else:
            curve = train_ours(options.folder, side, int(seed), recipe, options.every)
        partial = options.folder / f"{side}_{seed}.part"
        partial.write_text(json.dumps(curve))
        partial.rename(partial.with_suffix(".json"))
        return

    if "authors" in options.sides and options.authors is None:
        parser.error("the side `authors` needs --authors CHECKOUT")
    options.folder.mkdir(parents=True, exist_ok=True)
    asked, file = json.dumps(asdict(recipe) | {"every": options.every}), options.folder / "recipe.json"
    if file.exists() and file.read_text() != asked:
        parser.error(f"{options.folder} has runs of another recipe ({file}); choose another folder")
    file.write_text(asked)
    make_data(options.folder, recipe)
    started = datetime.datetime.now(datetime.UTC)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def run(job: str) -> int:
        done = options.folder / f"{job.replace(':', '_')}.json"
        late = (datetime.datetime.now(datetime.UTC) - started).total_seconds() > options.within
        if not done.exists() and not late:
            with open(done.with_suffix(".log"), "w") as log:
                command = [sys.executable, __file__, *sys.argv[1:], "--one", job]
                failed = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
            print(f"{job}: {'failed, see ' + log.name if failed else 'done'}", flush=True)
            return failed
        return 0

    with ThreadPoolExecutor(options.at_once) as pool:
        failures = sum(
            map(bool, pool.map(run, [f"{side}:{seed}" for seed in range(options.seeds) for side in options.sides]))
        )
    table = make_table(options.folder, options.sides, options.seeds)
    seconds = (datetime.datetime.now(datetime.UTC) - started).total_seconds()
    (options.folder / "table.md").write_text(f"{recipe}\n\n{table}\n")
    print(f"{recipe}\n{started.date()}, {seconds:.0f} s\n\n{table}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
