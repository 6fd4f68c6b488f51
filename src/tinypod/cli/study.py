"""`tinypod study`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tinypod.cli import shared
from tinypod.cli.shared import console, errors, study_app
from tinypod.errors import UserError

if TYPE_CHECKING:
    from tinypod.runs.folder import Run
    from tinypod.study.file import Study

StudyFolder = Annotated[str, typer.Argument(metavar="FOLDER", help="The folder of a study, or its gs:// URL.")]
Pack = Annotated[int | None, typer.Option(min=1, help="Runs in one program at most; 1: one run after another.")]


@study_app.command(cls=shared.TakesOverrides)
def run(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study file, or the name of a shipped one.")],
    overrides: shared.Overrides = None,
    folder: Annotated[
        str | None, typer.Option(help="Where its runs go, also gs://; default: studies/ and the file's name.")
    ] = None,
    pack: Pack = None,
    worker: Annotated[
        int,
        typer.Option(
            min=0,
            envvar=["TINYPOD_PROCESS_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX"],
            help="This one's number, from 0.",
        ),
    ] = 0,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that share the study: each takes its part of the runs, and then more.")
    ] = 1,
) -> None:
    """Train every run of a study, or resume where it was stopped.

    Runs that differ only in what is an argument of the step (seed, rates, decays, betas, warm-up, EMA decay,
    exploration) train together in one compiled program. Ctrl-C saves all of them; run it again to
    resume.

    The same command on several machines that see one folder, or one bucket, shares the runs among them: each trains
    some, and takes over those of a machine that is gone. `tinypod pod run` starts it so on every host of a slice.

    Examples: `tinypod study run studies/learning_rate steps=200`, `tinypod study run studies/width
    data.path=gs://b/sudoku --folder gs://b/studies/width --workers 8 --worker 3`
    """
    from tinypod.study.file import load_study

    loaded = load_study(study, overrides or [])
    run_and_show(loaded, folder, pack, worker, workers)


def run_and_show(
    study: "Study", folder: str | None, pack: int | None, worker: int = 0, workers: int = 1, quiet: bool = False
) -> None:
    from tinypod.runs.folder import open_run
    from tinypod.study.claims import Worker
    from tinypod.study.run import run_study
    from tinypod.study.status import table

    place = open_run(folder or Path("studies") / study.name)
    output = Console(quiet=True) if quiet else console
    ended = run_study(study, place, output, most=pack, worker=Worker(worker, max(workers, worker + 1)))
    if worker == 0:
        console.print(table(place.folder))
        if any(outcome.state in ("done", "stopped_early") for outcome in ended.outcomes):
            _write_report(place)
    if ended.stopped_by is not None:
        console.print(f"stopped by {ended.stopped_by.name}; run it again to resume", highlight=False)
        raise typer.Exit(128 + int(ended.stopped_by))
    if worker == 0 and any(outcome.state == "failed" for outcome in ended.outcomes):
        raise typer.Exit(UserError.exit_code)  # as for one run: starting it again does not help


@study_app.command()
def status(
    folder: StudyFolder,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every few seconds, until all have ended.")
    ] = False,
) -> None:
    """How the runs of a study stand.

    Example: `tinypod study status studies/learning_rate --watch`
    """
    from rich.live import Live

    from tinypod.runs.folder import open_run
    from tinypod.study.folder import ENDED, refresh
    from tinypod.study.status import read_rows, table

    place = open_run(folder)
    refresh(place)
    if not watch:
        console.print(table(place.folder))
        return
    with Live(table(place.folder), console=console, refresh_per_second=1) as live:
        while any(row.outcome.state not in ENDED for row in read_rows(place.folder)[1]):
            time.sleep(15 if place.remote else 2)
            refresh(place)
            live.update(table(place.folder))


@study_app.command()
def report(folder: StudyFolder) -> None:
    """One page that opens offline, a Markdown table, and each figure as PNG and CSV, in FOLDER/report.

    `tinypod study run` writes it at the end; a study that still runs can be reported on as far as it is.

    Example: `tinypod study report studies/learning_rate`
    """
    from tinypod.runs.folder import open_run
    from tinypod.study.folder import refresh

    place = open_run(folder)
    refresh(place, wholly=True)
    _write_report(place)


def _write_report(place: "Run") -> None:
    from tinypod.study.report import write_report

    write_report(place.folder, console)
    if place.remote is not None:
        place.push()
        console.print(f"also in {place}/report", highlight=False)


@study_app.command(cls=shared.TakesOverrides)
def plan(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study file, or the name of a shipped one.")],
    overrides: shared.Overrides = None,
    slice_name: Annotated[str, typer.Option("--slice", help="A TPU slice, like `v4-64`.")] = "",
    prices_file: Annotated[
        Path | None, typer.Option("--prices", help="Your own table of prices, in YAML; default: the package's.")
    ] = None,
    grant: Annotated[bool, typer.Option("--grant", help="Chips are free (TPU Research Cloud).")] = False,
) -> None:
    """Runs, programs, hours and price of a study on a slice you don't have.

    Example: `tinypod study plan studies/width --slice v4-64`
    """
    from tinypod.planning.prices import read_prices
    from tinypod.planning.slices import find_slice
    from tinypod.study.file import load_study
    from tinypod.study.plan import plan_study, summary, table

    if not slice_name:
        raise UserError("name the hardware: --slice v4-64")
    loaded, target = load_study(study, overrides or []), find_slice(slice_name.strip().lower())
    found = plan_study(loaded, target, read_prices(prices_file, grant=grant), errors)
    console.print(table(found))
    console.print(summary(found), highlight=False)
