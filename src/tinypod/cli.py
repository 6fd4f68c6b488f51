"""The commands: parse, dispatch, print. What they do stands in the modules they call."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tinypod.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train tiny recursive reasoning models: one command for a laptop, a GPU or a TPU pod.",
)
data_app = typer.Typer(no_args_is_help=True, help="Build, generate and import datasets.")
weights_app = typer.Typer(no_args_is_help=True, help="PyTorch weights in and out.")
app.add_typer(data_app, name="data")
app.add_typer(weights_app, name="weights")

console = Console()
errors = Console(stderr=True)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[a.b=value]...",
        help="Config keys to change, like `steps=1000` or `model.mixing.kind=attention`.",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
WeightsOption = Annotated[
    Literal["ema", "live"] | None, typer.Option("--weights", help="Which weights; default: the config's eval.weights.")
]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="Which one: `best`, `latest` or a step.")]


def main() -> None:
    """The console script: a user's error is a message and its exit code, never a traceback."""
    try:
        app()
    except UserError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.filename is None and error.strerror is None:
            raise
        _fail(f"{error.filename or 'a file'}: {error.strerror}")


def _fail(message: str, exit_code: int = UserError.exit_code) -> None:
    errors.print("[bold red]error:[/] ", end="")
    errors.print(message, markup=False, highlight=False, soft_wrap=True)
    sys.exit(exit_code)


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        console.print(f"tinypod {version('tinypod')}", highlight=False)
        raise typer.Exit


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A YAML config, or a run folder to go on with.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="The run folder; default: runs/ and the config's name.")
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", help="Go on from this checkpoint, once; newer ones are set aside, not deleted."),
    ] = None,
) -> None:
    """Train, or go on where the run folder left off.

    Starting the same command again continues from the latest checkpoint. Ctrl-C (exit code 130) and SIGTERM (143)
    save one first.

    Example: `tinypod train configs/demo.yaml steps=500 --run runs/short`
    """
    from tinypod import config as configs
    from tinypod import run as runs
    from tinypod import train as training
    from tinypod.experiment import ExperimentConfig

    of_a_run = config.name == runs.CONFIG and (config.parent / runs.CHECKPOINTS).is_dir()
    folder = config if config.is_dir() else config.parent if of_a_run else None
    run_dir = run or folder or Path("runs") / config.stem
    path = config / runs.CONFIG if config.is_dir() else config
    outcome = training.train(configs.load(path, overrides or [], ExperimentConfig), run_dir, console, from_step)
    _print_summary(run_dir, outcome)
    if not outcome.trained and outcome.stopped_by is None:
        console.print(f"nothing left to do at step {outcome.step}; to train further, raise steps=", highlight=False)
    if outcome.stopped_by is not None:
        console.print(f"stopped by {outcome.stopped_by.name}; start the same command again to go on", highlight=False)
        raise typer.Exit(128 + int(outcome.stopped_by))


def _print_summary(run_dir: Path, outcome: Any) -> None:
    from tinypod import report

    facts = report.summary(run_dir)
    table = Table(title=f"{run_dir}", show_header=False, title_justify="left")
    table.add_row("steps done", f"{outcome.step:,}")
    if facts["eval"]:
        table.add_row("held-out exact", f"{facts['eval']['eval/exact_accuracy']:.2%}")
        table.add_row("held-out cells", f"{facts['eval']['eval/cell_accuracy']:.2%}")
    if outcome.best is not None:
        table.add_row("best checkpoint", f"step {outcome.best[0]:,} ({outcome.best[1]:.4f})")
    for name, label in (("final_loss", "last loss"), ("examples_per_s", "examples/s")):
        if facts.get(name) is not None:
            table.add_row(label, f"{facts[name]:,.4g}")
    table.add_row("curves", str(run_dir / "curves.png"))
    console.print(table)


@app.command("eval")
def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = "best",
    weights: WeightsOption = None,
    halt_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to think, e.g. 64; default: as in training.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="The split; default: the config's data.eval_split.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a run on a whole split: every puzzle exactly once.

    Another dataset: `tinypod eval RUN data.path=FOLDER`. More thinking than in training: `--halt-steps 64`.
    """
    import json

    from tinypod import run as runs
    from tinypod.evaluate import Evaluator
    from tinypod.progress import counting
    from tinypod.step import evaluation_params

    experiment, state = runs.load_state(run, overrides or [], checkpoint)
    config = experiment.config
    weights = weights or config.eval.weights
    rows = experiment.read_split(split or config.data.eval_split)
    evaluator = Evaluator(experiment, rows, config.eval.batch_size, halt_steps, limit)
    with counting(errors if as_json else console, "evaluating", evaluator.rows) as progress:
        scores = evaluator(evaluation_params(state, weights), progress)
    steps = halt_steps or config.task.halting.max_steps
    if as_json:
        described = {"step": int(state.step), "weights": weights, "halt_steps": steps, **scores}
        print(json.dumps(described))
        return
    table = Table(
        title=f"{run}, step {int(state.step)}, {weights} weights, {steps} steps a puzzle",
        title_justify="left",
    )
    for name in ("source", "puzzles", "exact", "cells", "halting", "mean steps"):
        table.add_column(name, justify="left" if name == "source" else "right")
    sources = [name.removeprefix("puzzles/") for name in scores if name.startswith("puzzles/")]
    for source in [*sources, None]:
        end = f"/{source}" if source else ""
        table.add_row(
            source or "all",
            f"{scores['puzzles' + end]:,.0f}",
            *(f"{scores[name + end]:.2%}" for name in ("exact_accuracy", "cell_accuracy", "halt_accuracy")),
            f"{scores['steps' + end]:.2f}",
        )
    console.print(table)


@app.command()
def solve(
    run: RunFolder,
    puzzle: Annotated[
        str | None,
        typer.Argument(help="A puzzle in characters (`.` blank), or a file with one a line; default: a held-out one."),
    ] = None,
    checkpoint: CheckpointOption = "best",
    weights: WeightsOption = None,
    halt_steps: Annotated[int | None, typer.Option(min=1, help="Steps to think; default: as in training.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Show each so-many-th step.")] = 1,
    number: Annotated[
        int | None, typer.Option(min=0, help="Which held-out puzzle, when none is given; default: one that takes long.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the (first) answer into this SVG file.")] = None,
) -> None:
    """Show an answer being refined step by step, and when the model itself would have stopped."""
    from tinypod import display, solve
    from tinypod import run as runs
    from tinypod.step import evaluation_params

    experiment, state = runs.load_state(run, [], checkpoint)
    weights = weights or experiment.config.eval.weights
    refinements = solve.refinements(experiment, evaluation_params(state, weights), puzzle, number, halt_steps)
    for refinement in refinements:
        console.print(display.render_refinement(refinement, every))
    if len(refinements) > 1:
        console.print(f"solved {sum(r.solved for r in refinements)} of {len(refinements)}", highlight=False)
    if svg is not None:
        display.save_svg(refinements[0], svg, every)


@data_app.command("sudoku")
def data_sudoku(
    out: Annotated[Path, typer.Argument(help="The dataset folder to make.")],
    train_csv: Annotated[Path | None, typer.Option("--train-csv", help="The official train.csv.")] = None,
    test_csv: Annotated[Path | None, typer.Option("--test-csv", help="The official test.csv.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Make puzzles up instead of reading them.")] = False,
    train_size: Annotated[
        int, typer.Option("--train-size", min=1, help="Training puzzles, drawn with the seed.")
    ] = 1000,
    test_size: Annotated[
        int | None,
        typer.Option("--test-size", min=1, help="Held-out puzzles; default: all there are, or 1000 made up."),
    ] = None,
    box: Annotated[
        str, typer.Option(help="Rows x columns of a box: 3x3 is the usual 9×9, 2x3 a 6×6, 2x2 a 4×4.")
    ] = "3x3",
    clues: Annotated[
        int | None,
        typer.Option(min=1, help="With --generate: at least this many clues; default: as few as can be."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the subsample, or the puzzles made up.")] = 0,
) -> None:
    """Sudoku puzzles with exactly one solution each.

    From the Hugging Face hub (Sudoku-Extreme), from local CSVs with `--train-csv` and `--test-csv`, or made up with
    `--generate`. Rows that are no valid puzzle are refused with their line number.

    Examples: `tinypod data sudoku data/sudoku --train-size 1000` ·
    `tinypod data sudoku data/small --generate --box 2x2 --clues 6 --train-size 200 --test-size 100`
    """
    from tinypod.data import build

    info = build.build_sudoku(
        out,
        train_csv=train_csv,
        test_csv=test_csv,
        generate=generate,
        train_size=train_size,
        test_size=test_size,
        box=build.parse_box(box),
        clues=clues,
        seed=seed,
        console=console,
    )
    build.describe(out, info, console)


@data_app.command("import")
def data_import(
    folder: Annotated[Path, typer.Argument(help="A folder that the TRM authors' scripts made (train/, test/).")],
    out: Annotated[Path, typer.Argument(help="The dataset folder to make.")],
) -> None:
    """Read the TRM authors' converted datasets (`train/all__inputs.npy` and so on)."""
    from tinypod.data import build, puzzles

    info, splits = puzzles.import_authors_folder(folder)
    build.describe(out, puzzles.write_dataset(out, info, splits), console)


@weights_app.command("export")
def weights_export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(help="The PyTorch file to write.")],
    checkpoint: CheckpointOption = "best",
    weights: WeightsOption = None,
) -> None:
    """Write a run's weights as the TRM authors' PyTorch state dict."""
    from tinypod import run as runs
    from tinypod.models import torch_weights
    from tinypod.step import evaluation_params

    experiment, state = runs.load_state(run, [], checkpoint)
    weights = weights or experiment.config.eval.weights
    torch_weights.write_state_dict(out, torch_weights.to_state_dict(evaluation_params(state, weights)))
    console.print(f"wrote {out}: step {int(state.step)}, {weights} weights", highlight=False)


@weights_app.command("import")
def weights_import(
    weights_file: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="The authors' state dict, a PyTorch file.")],
    config: Annotated[Path, typer.Argument(help="The config of that model.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder to make.")],
    overrides: Overrides = None,
) -> None:
    """Make a run folder from the TRM authors' PyTorch weights, to evaluate, solve with, or train further."""
    from tinypod import config as configs
    from tinypod import run as runs
    from tinypod.experiment import ExperimentConfig
    from tinypod.models import torch_weights

    resolved = configs.load(config, overrides or [], ExperimentConfig)
    runs.create_from_params(run, resolved, torch_weights.read_state_dict(weights_file))
    console.print(f"{run}: a run at step 0 with the weights of {weights_file}", highlight=False)
