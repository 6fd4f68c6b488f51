"""From a text to a table: a small teacher, its copies in 4 and in 2 bits, and what distillation gives back.

Every step is a `tinypod` command, printed before it runs. A step whose scores are there is not repeated, and a training
that was stopped is resumed: run this again after Ctrl-C. Everything is in one folder; remove it to begin anew.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import library_text
from rich.console import Console
from rich.table import Table

from tinypod.config import load
from tinypod.experiment import ExperimentConfig
from tinypod.models import qwen3

console = Console()


class Stage(NamedTuple):
    name: str  # of its scores
    label: str
    recipe: str
    quantised: str | None = None  # the stage whose loss of perplexity this one is to make good


STAGES = (
    Stage("teacher", "full", "demo_teacher"),
    Stage("4bit_quantised", "4 bits, quantised", "demo_4bit"),
    Stage("4bit_recovered", "4 bits, recovered", "demo_4bit", "4bit_quantised"),
    Stage("2bit_quantised", "2 bits, quantised", "demo_2bit"),
    Stage("2bit_recovered", "2 bits, recovered", "demo_2bit", "2bit_quantised"),
    Stage("2bit_lora", "2 bits, and LoRA", "demo_lora", "2bit_quantised"),
)


def tinypod(*arguments: object) -> str:
    """Runs a command. What it prints is shown, but for JSON, which is returned."""
    words = [str(argument) for argument in arguments]
    console.print("\ntinypod " + " ".join(words), style="bold", markup=False, highlight=False, soft_wrap=True)
    # XLA computes the inside of a loop over layers on one core: two devices make use of two.
    environment = {"JAX_NUM_CPU_DEVICES": "2"} | os.environ
    kept = subprocess.PIPE if "--json" in words else None
    done = subprocess.run([sys.executable, "-m", "tinypod", *words], env=environment, stdout=kept, text=True)
    if done.returncode:
        console.print("the command above did not finish; run this again to continue from there")
        sys.exit(done.returncode)
    return done.stdout or ""


class Demo:
    def __init__(self, folder: Path, blocks: int, overrides: list[str]) -> None:
        self.folder, self.blocks, self.overrides = folder, blocks, overrides
        self.teacher, self.lora = folder / "teacher", folder / "2bit_lora"

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        words = self.folder / "text.jsonl"
        if not words.exists():
            library_text.write(words)
        self.cache("text", words)
        if not self.has_scores("teacher"):
            self.train(self.teacher, "demo_teacher", "text")
        self.cache(
            "logits", words, "--teacher", self.teacher, "--topk", 32, "--blocks", self.blocks, "--batch-size", 64
        )
        self.score("teacher", self.teacher)
        for bits in ("4bit", "2bit"):
            run = self.folder / bits
            self.quantise(f"{bits}_quantised", self.teacher, f"demo_{bits}", run)
            self.recover(f"{bits}_recovered", run)
        if not self.has_scores("2bit_lora"):
            self.start(self.folder / "2bit", "demo_lora", self.lora)
            self.recover("2bit_lora", self.lora)

    def cache(self, name: str, *arguments: object) -> None:
        """A build that was stopped is continued by the same command."""
        if not (self.folder / name / "manifest.json").exists():
            tinypod("cache", "build", self.folder / name, *arguments, "--length", 128, "--held-out", 0.02)

    def train(self, run: Path, recipe: str, data: str) -> None:
        tinypod("train", f"distill/{recipe}", "--run", run, f"data.path={self.folder / data}", *self.overrides)

    def start(self, source: Path, recipe: str, run: Path) -> None:
        """A run with another's weights. One that was not finished is made again."""
        data = f"data.path={self.folder / 'logits'}"
        if not (run / "metrics.jsonl").exists():
            shutil.rmtree(run, ignore_errors=True)
            tinypod("weights", "import", source, f"distill/{recipe}", run, data, *self.overrides)

    def quantise(self, name: str, source: Path, recipe: str, run: Path) -> None:
        if not self.has_scores(name):
            self.start(source, recipe, run)
            self.score(name, run)

    def recover(self, name: str, run: Path) -> None:
        if not self.has_scores(name):
            tinypod("train", run)
            self.score(name, run)

    def path_of(self, name: str) -> Path:
        return self.folder / "scores" / f"{name}.json"

    def has_scores(self, name: str) -> bool:
        return self.path_of(name).exists()

    def score(self, name: str, run: Path) -> None:
        """On the blocks held out of both trainings, with the teacher's logits."""
        if self.has_scores(name):
            return
        data = f"data.path={self.folder / 'logits'}"
        scores = tinypod("eval", run, data, "--checkpoint", "latest", "--json")
        path = self.path_of(name)
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".partial").write_text(scores)
        path.with_suffix(".partial").replace(path)

    def scores(self, name: str) -> dict[str, Any]:
        return json.loads(self.path_of(name).read_text())

    def table(self) -> Table:
        table = Table(title="Held-out text: perplexity of a byte", title_justify="left")
        table.add_column("weights")
        for title in ("bits", "perplexity", "regained", "KD loss", "agrees"):
            table.add_column(title, justify="right")
        full = self.scores("teacher")["perplexity"]
        for stage in STAGES:
            scores = self.scores(stage.name)
            regained, lost = "", self.scores(stage.quantised)["perplexity"] if stage.quantised else full
            if lost > full:
                regained = f"{(lost - scores['perplexity']) / (lost - full):.1%}"
            bits, against = f"{bits_per_weight(stage.recipe, self.overrides):.2f}", f"{scores['kd_loss']:.4f}"
            perplexity, agrees = f"{scores['perplexity']:.3f}", f"{scores['agreement']:.1%}"
            table.add_row(stage.label, bits, perplexity, regained, against, agrees)
        return table


def bits_per_weight(recipe: str, overrides: list[str]) -> float:
    """Of the linear layers; scales and adapters count with 16 bits, plain weights with 32."""
    model = load(Path(f"distill/{recipe}"), overrides, ExperimentConfig).model
    layers = jax.eval_shape(lambda: qwen3.init(model, jax.random.key(0)))["layers"]
    bits, weights = 0, 0
    for name, (group, *_) in qwen3.LINEARS.items():
        for part, x in layers[group][name].items():
            weights += x.size if part in ("weight", "index") else 0
            bits += x.size * (32 if part == "weight" else model.bits(name) if part == "index" else 16)
    return bits / weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo_distill"), help="where everything goes")
    parser.add_argument("--blocks", type=int, default=3600, help="blocks of 128 bytes that the students see")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="config keys to change, in every training")
    given = parser.parse_args()
    demo = Demo(given.folder, given.blocks, given.overrides)
    # Ctrl-C goes to the command that runs, which saves what it has; this program waits for it.
    signal.signal(signal.SIGINT, lambda *_: None)
    demo.run()
    console.print(demo.table())
