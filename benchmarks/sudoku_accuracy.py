"""How much a trained model solves: against minutes of training, and against the thought that it spends on a puzzle.

    python benchmarks/sudoku_accuracy.py OUT RUN [RUN ...]
    python benchmarks/sudoku_accuracy.py OUT RUN --splits holdout --settings 16 128 16x8 "16x8 first"

A RUN is a run folder or a release; those that differ in their seed alone are one row, and with `--recipe NAME` all of
one call are. The dataset is the run's own (another, and for releases: `--data FOLDER`). A setting is the steps of each
chain, with `x` the symmetric views, with `*` the trajectories (with noise of `--noise`), then how one answer is chosen:
`16`, `128`, `16x8`, `64x8 confident`, `16*8 every_step confident`. What a run scored with a setting is in
`scores.jsonl`, beside the command that gives the same. Settings that differ in their steps alone are scored in one
pass; where the first chain to stop ends the thinking, each puzzle is a batch of its own, so that none waits for
another.

A score that is in OUT's `scores.jsonl` is not computed again for the same step of the run, here or on another device.
`table.md` has all that are in it and says on what they were computed, `thinking.png` those that this call asks for.
Curves from the metrics of run folders are added to `curves.jsonl`; `training.png` shows all that are in that. README
and docs show what is in `benchmarks/sudoku_accuracy/`.
"""

import argparse
import dataclasses
import hashlib
import json
import re
import shlex
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np

matplotlib.use("agg")
from matplotlib import pyplot

import tinypod
from tinypod import sharding
from tinypod.data import puzzles
from tinypod.evaluate import Evaluator
from tinypod.tasks import puzzle, puzzle_scores
from tinypod.tasks.puzzle_thinking import Thought

SETTINGS = ["16", "32", "64", "128", "16x8", "64x8", "16x8 settled", "16*8 confident", "16*8 every_step confident"]
ENDING = ("first", "settled", "valid")  # choices that end a puzzle's chains
SETTING = re.compile(r"(?P<steps>\d+)(x(?P<views>\d+))?(\*(?P<trajectories>\d+))?(?P<words>( \w+)*)")
COLOURS = ("#2a78b5", "#d1495b", "#2e8b57", "#c77d0a", "#7b5ea7", "#178f9c")


def parse(setting: str, noise: float) -> dict[str, Any]:
    """As keyword arguments of `Model.evaluate`."""
    match = SETTING.fullmatch(setting)
    if match is None:
        raise SystemExit(f"setting {setting!r}: expected such as 16, 128, 16x8, 16x8 first, 16*8 every_step confident")
    thinking: dict[str, Any] = {"halt_steps": int(match["steps"])}
    if match["views"]:
        thinking["views"] = int(match["views"])
    if match["trajectories"]:
        thinking |= {"trajectories": int(match["trajectories"]), "noise": noise}
    for word in match["words"].split():
        thinking["noise_at" if word in ("start", "every_step") else "choose"] = word
    return thinking


def overrides(thinking: dict[str, Any], data: str | None) -> dict[str, Any]:
    changes: dict[str, Any] = {"data.path": data} if data else {}
    if thinking.get("choose") in ENDING:
        changes["eval.batch_size"] = thinking.get("views", 1) * thinking.get("trajectories", 1)
    return changes


def command(run: str, split: str, limit: int | None, data: str | None, thinking: dict[str, Any]) -> str:
    words = ["tinypod", "eval", run, *(f"{key}={value}" for key, value in overrides(thinking, data).items())]
    words += ["--checkpoint", "latest", "--split", split]
    if limit:
        words += ["--limit", str(limit)]
    for name, value in thinking.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def name_of(config: Any) -> str:
    """What runs that differ in their seed share: in short what it is, and some digits that stand for all the rest."""
    model, optimizer = config.model, config.optimizer
    trained = config.model_dump(mode="json", include={"model", "task", "optimizer", "data", "batch_size", "steps"})
    trained |= {"ema_decay": config.ema_decay, "data": {**trained["data"], "path": ""}}
    digest = hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()[:4]
    recursion = f"H {model.H_cycles} L {model.L_cycles}"
    short = f"{optimizer.kind}, {model.mixing.kind}, {recursion}, batch {config.batch_size}, {config.steps:,} steps"
    return f"{short} ({digest})"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def score(out: Path, runs: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    file = out / "scores.jsonl"
    known = {row["command"]: row for row in read(file)}
    asked_for = []
    for run in runs:
        # The last checkpoint: the best one was chosen by the puzzles that are scored here.
        model = tinypod.load(run, overrides({}, options.data), checkpoint="latest")
        for split in options.splits:
            limit = options.limit if split == "test" else None
            asked = {
                text: command(run, split, limit, options.data, parse(text, options.noise)) for text in options.settings
            }
            at = {text: known.get(asked[text], {}).get("step") for text in options.settings}
            new = [text for text in options.settings if at[text] != model.step]
            for group in passes(new, options.noise):
                changes = overrides(next(iter(group.values())), options.data)
                found = evaluate(tinypod.load(run, changes, checkpoint="latest"), split, limit, group)
                for setting, scores in found.items():
                    row: dict[str, Any] = {"command": asked[setting], "run": run}
                    row |= {"recipe": options.recipe or name_of(model.config)}
                    row |= {"seed": model.config.seed, "setting": setting, "split": split, "step": model.step}
                    row |= {"weights": model.weights, "device": jax.devices()[0].device_kind, "scores": scores}
                    known[asked[setting]] = row
                    with open(file, "a") as lines:
                        lines.write(json.dumps(row) + "\n")
                    exact, cost = scores["exact_accuracy"], scores["cost"]
                    print(f"{exact:.2%} at {cost:.1f} steps: {asked[setting]}", flush=True)
            asked_for += [known[asked[text]] for text in options.settings]
    return asked_for


def passes(settings: list[str], noise: float) -> list[dict[str, dict[str, Any]]]:
    """Settings in groups that one pass can score: all else but the steps alike, and no chain stops before the last."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for text in settings:
        thinking = parse(text, noise)
        besides = {name: value for name, value in thinking.items() if name != "halt_steps"}
        alone = text if besides.get("choose") in ENDING else ""
        groups.setdefault(json.dumps(besides) + alone, {})[text] = thinking
    return list(groups.values())


def evaluate(
    model: Any, split: str, limit: int | None, settings: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """What `Model.evaluate` gives with each of these settings, which are the same but for their steps."""
    if len(settings) == 1:
        return {text: model.evaluate(split, limit=limit, **thinking) for text, thinking in settings.items()}
    most = max(settings.values(), key=lambda thinking: thinking["halt_steps"])
    loaded = model.loaded(**most)
    experiment, config = loaded.experiment, loaded.experiment.config
    opened, placement = puzzle.open_data(config, False, None), sharding.place(experiment.mesh, experiment.specs)
    held_out, sources = puzzles.read_split(*opened, split), opened.info.sources
    think = puzzle.make_thinking(config.task, config.model, opened.info, placement)
    chains, continues = config.task.thinking.chains, config.task.continue_loss

    def of_thought(thought: Thought | None, steps: int) -> Any:
        def first(*_: Any) -> Thought:
            assert thought is not None
            return Thought(thought.answers[:steps], thought.q[:steps], thought.cost * (steps / most["halt_steps"]))

        return puzzle_scores.evaluation(first, held_out, sources, copies=chains, continues=continues)

    lengths = {text: thinking["halt_steps"] for text, thinking in settings.items()}
    plain = of_thought(None, 0)

    def score_batch(params: Any, batch: dict[str, Any]) -> dict[str, Any]:
        thought = think(params, batch["inputs"], batch["identifiers"])
        parts = {text: of_thought(thought, steps).score(params, batch) for text, steps in lengths.items()}
        return {f"{text}: {name}": value for text, sums in parts.items() for name, value in sums.items()}

    together = dataclasses.replace(plain, score=score_batch)
    evaluator = Evaluator(together, experiment.mesh, experiment.specs, config.eval.batch_size, limit)
    sums = evaluator.sums(loaded.params, None)
    found = {}
    for text in settings:
        of_this = {name.removeprefix(f"{text}: "): x for name, x in sums.items() if name.startswith(f"{text}: ")}
        found[text] = evaluator.summarise(of_this)
    return found


def training_curves(out: Path, runs: list[str], recipe: str | None) -> list[dict[str, Any]]:
    """Minutes of training (evaluations, checkpoints and pauses left out) and the share of held-out puzzles solved."""
    file = out / "curves.jsonl"
    known = {row["run"]: row for row in read(file)}
    for run in runs:
        model = tinypod.load(run)
        paces = [(row["step"], row["perf/step_ms"]) for row in model.metrics if row.get("perf/step_ms")]
        scores = [(row["step"], row["eval/exact_accuracy"]) for row in model.metrics if "eval/exact_accuracy" in row]
        if paces and scores:
            at, pace = (np.array(column, float) for column in zip(*paces, strict=True))
            minutes = np.cumsum(pace * np.diff(at, prepend=0)) / 60_000
            steps, solved = zip(*scores, strict=True)
            known[run] = {"run": run, "recipe": recipe or name_of(model.config), "seed": model.config.seed}
            known[run] |= {"steps": steps, "minutes": np.interp(steps, at, minutes).round(2).tolist(), "solved": solved}
    if known:
        file.write_text("".join(json.dumps(row) + "\n" for row in known.values()))
    return list(known.values())


def spread(values: Iterable[float]) -> str:
    found = list(values)
    middle = f"{100 * statistics.mean(found):.2f}"
    return middle if len(found) == 1 else f"{middle} ± {100 * statistics.stdev(found):.2f}"


def make_table(rows: list[dict[str, Any]]) -> str:
    sources = sorted({name for row in rows for name in row["scores"] if name.startswith("exact_accuracy/")})
    titles = ["recipe", "seeds", "device", "setting", "cost in steps", "split", "puzzles", "solved"]
    titles += [s.split("/", 1)[1] for s in sources]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in {row["command"]: row for row in rows}.values():  # the last of each
        groups.setdefault((row["recipe"], row["device"], row["setting"], row["split"]), []).append(row)
    for (recipe, device, setting, split), group in groups.items():
        scores = [row["scores"] for row in group]
        cost = statistics.mean(one["cost"] for one in scores)
        cells = [recipe, str(len(group)), device, setting, f"{cost:.1f}", split, f"{scores[0]['count']:,.0f}"]
        cells.append(spread(one["exact_accuracy"] for one in scores))
        cells += [spread(one[s] for one in scores) if s in scores[0] else "" for s in sources]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_training(out: Path, curves: list[dict[str, Any]]) -> None:
    if not curves:
        return
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    colours: dict[str, str] = {}
    for curve in curves:
        recipe = curve["recipe"]
        label = None if recipe in colours else recipe
        colour = colours.setdefault(recipe, COLOURS[len(colours) % len(COLOURS)])
        axes.plot(curve["minutes"], [100 * x for x in curve["solved"]], color=colour, label=label, linewidth=1.6)
    axes.set(xlabel="minutes of training", ylabel="held-out puzzles solved, %", ylim=(0, 100), xlim=(0, None))
    _finish(axes)
    figure.savefig(out / "training.png", dpi=200)


def draw_thinking(out: Path, rows: list[dict[str, Any]]) -> None:
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    series: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for row in rows:
        point = row["scores"]["cost"], 100 * row["scores"]["exact_accuracy"], row["setting"]
        puzzles = f"{row['scores']['count']:,.0f} of {row['split']}"
        series.setdefault((row["recipe"], puzzles), []).append(point)
    alone = len({recipe for recipe, _ in series}) == 1
    for number, ((recipe, puzzles), points) in enumerate(series.items()):
        name = puzzles if alone else f"{recipe}: {puzzles}"
        colour = COLOURS[number % len(COLOURS)]
        for setting in dict.fromkeys(point[2] for point in points):
            here = [point for point in points if point[2] == setting]
            cost, solved = statistics.mean(p[0] for p in here), statistics.mean(p[1] for p in here)
            first, other = setting == points[0][2], number % 2 == 1
            # Trajectories cost what views do: hollow, so that neither hides the other.
            noisy = "*" in setting
            marker, size, face = ("s", 6, "none") if noisy else ("o", 4, colour)
            label = name if first else None
            axes.plot(cost, solved, marker, color=colour, markersize=size, markerfacecolor=face, label=label)
            left = noisy and not other
            beside, side = (-4 if left else 4, -8 if other or left else 2), "right" if left else "left"
            text = setting.replace(" every_step", "")
            axes.annotate(text, (cost, solved), xytext=beside, ha=side, textcoords="offset points", fontsize=6.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)
    axes.set(xlabel="steps of the model for one puzzle", ylabel="puzzles solved, %")
    _finish(axes)
    figure.savefig(out / "thinking.png", dpi=200)


def _finish(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=7.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for the scores, which are kept, and for table and pictures")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", help="a dataset folder; default: the one that a run was trained with")
    parser.add_argument("--splits", nargs="+", default=["holdout", "test"], help="default: holdout test")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help=f"default: {', '.join(SETTINGS)}")
    parser.add_argument("--noise", type=float, default=0.5, help="that trajectories get; default: 0.5")
    parser.add_argument("--recipe", help="what these runs are called in table and pictures")
    parser.add_argument("--limit", type=int, help="rows of the split `test`; default: all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = score(options.out, options.runs, options)
    table = make_table(read(options.out / "scores.jsonl"))
    (options.out / "table.md").write_text(table + "\n")
    draw_training(options.out, training_curves(options.out, options.runs, options.recipe))
    draw_thinking(options.out, rows)
    print(table)


if __name__ == "__main__":
    main()
