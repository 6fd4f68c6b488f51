"""`tinypod pod`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinypod.cli.shared import Overrides, TakesOverrides, app, console, load_config
from tinypod.errors import UserError
from tinypod.runs.terminal import dollars, say

if TYPE_CHECKING:
    from tinypod.pod.gcloud import Gcloud
    from tinypod.pod.job import Job

pod_app = typer.Typer(no_args_is_help=True, help="TPU slices: bring one up, train on it, take it down.")
app.add_typer(pod_app, name="pod")

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="A YAML file that says which slice; see examples/pod.yaml.")]
ConfigFile = Annotated[str, typer.Argument(help="A YAML config or study, or the name of a shipped one.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the gcloud commands instead of running them.")]
RunUrl = Annotated[str, typer.Option("--run", help="Where the run or the study is stored: gs://BUCKET/FOLDER.")]


@pod_app.command("up")
def up(spec: Spec, dry_run: DryRun = False) -> None:
    """Ask for the slice, and wait until it is ready. Ctrl-C leaves a request in the queue.

    Says why when there is no capacity. What is left of a preempted slice or a failed request is deleted first.
    """
    from tinypod.pod import lifecycle

    gcloud = _gcloud(spec, dry_run)
    try:
        lifecycle.up(gcloud, console)
    except KeyboardInterrupt:
        say(
            console, f"\nthe request stays: `tinypod pod up {spec}` keeps waiting, `tinypod pod down {spec}` cancels it"
        )
        raise typer.Exit(130) from None


@pod_app.command("run", cls=TakesOverrides)
def run(
    spec: Spec,
    config: ConfigFile,
    overrides: Overrides = None,
    run: RunUrl = "",
    keep: Annotated[
        bool, typer.Option("--keep", help="Bring the slice up, and again when it is lost, until the run is done.")
    ] = False,
    down: Annotated[bool, typer.Option("--down", help="Delete the slice when the run has ended.")] = False,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="On the workers: restart after a crash even when no one is watching.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Train on the slice: send code, config and versions (only what changed), start every worker, show what they print.

    The workers train detached. Ctrl-C, a closed laptop or a lost connection end the watching, not the run; the same
    command attaches again. Ends with the exit code of the training.

    With `--keep`: a slice that is preempted or faulty is deleted and asked for again, and training resumes from its
    last checkpoint, until it is done, has failed three times at one step, or has cost `spending_limit_dollars`.

    A study works the same: every host trains some of its runs with its own chips, until all have ended.

    Example: `tinypod pod run pod.yaml trm/sudoku_mlp data.path=gs://b/sudoku --run gs://b/runs/first --keep --down`
    """
    from tinypod.pod import lifecycle
    from tinypod.pod.keep import PodRun
    from tinypod.pod.state import read_state
    from tinypod.runs.folder import open_run

    _check_run(run)
    gcloud, place = _gcloud(spec, dry_run), open_run(run)
    job = _job(config, overrides, str(place), supervise=supervise)
    _check_configs(job)
    pod_run = PodRun(gcloud, place, job, console)
    try:
        code = pod_run.keep() if keep and not dry_run else pod_run.once()
    except KeyboardInterrupt:
        say(console, "\ndetached: the run continues. Run this command again to attach; `tinypod pod down` ends it")
        raise typer.Exit(130) from None
    if dry_run:
        return
    state = read_state(gcloud)
    if down and state.phase != "absent":
        say(console, f"deleting {gcloud.spec.name}")
        lifecycle.delete(gcloud, state)
    elif state.phase == "ready":
        price = gcloud.spec.hourly_dollars
        cost = "" if not price else f" and costs {dollars(price)} per hour"
        say(console, f"{gcloud.spec.name} is still up{cost}; `tinypod pod down {spec}` deletes it", "yellow")
    raise typer.Exit(code)


@pod_app.command("logs")
def logs(
    spec: Spec,
    worker: Annotated[int | None, typer.Option("--worker", min=0, help="Of this worker only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run has ended.")] = False,
) -> None:
    """What the workers have printed, each line with its worker's number."""
    import time

    from tinypod.pod.keep import show_line
    from tinypod.pod.workers import Workers

    gcloud = _gcloud(spec, False)
    workers = Workers(gcloud)
    if worker is not None and worker >= workers.count:
        raise UserError(f"--worker {worker}: {gcloud.spec.type} has workers 0 to {workers.count - 1}")
    rests: dict[int, bytes] = {}
    while True:
        reports = workers.reports()
        for number, report in enumerate(reports):
            if worker is not None and number != worker:
                continue
            if report.unreachable is not None:
                raise UserError(report.unreachable)
            *lines, rests[number] = (rests.get(number, b"") + report.log).split(b"\n")
            for line in lines:
                show_line(console, number, line)
        if not any(report.log for report in reports):
            if not follow or all(report.state != "running" for report in reports):
                return
            time.sleep(gcloud.spec.poll_s)


@pod_app.command("status")
def status(spec: Spec, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """The slice and its workers: state, step, lag, age of the heartbeat; where the run's time and money went."""
    import json

    from tinypod.pod.status_view import PodStatus

    found = PodStatus(_gcloud(spec, False))
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        console.print(found.render())


@pod_app.command("down")
def down(
    spec: Spec,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dead: Annotated[
        bool, typer.Option("--dead", help="Also other requests in the zone that are suspended or failed.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Delete the slice, and its request in the queue in whatever state: suspended and failed ones use up quota.

    Training that is still running is stopped first, so that it saves. Always asks, unless `--yes`.
    """
    from tinypod.pod import lifecycle
    from tinypod.pod.state import read_state

    gcloud = _gcloud(spec, dry_run)
    if dry_run:
        gcloud.delete_request() if gcloud.spec.is_queued else gcloud.delete_node()
        return
    state, others = read_state(gcloud), lifecycle.dead_requests(gcloud)
    if others and not dead:
        say(console, f"suspended or failed requests in {gcloud.spec.zone} use up quota: {', '.join(others)} (--dead)")
    doomed = [f"{gcloud.spec.name} ({gcloud.spec.slice.name}, {state.describe()})"] if state.phase != "absent" else []
    doomed += others if dead else []
    if not doomed:
        say(console, f"{gcloud.spec.name}: there is nothing to delete")
        return
    if not yes and not typer.confirm(f"Delete {', '.join(doomed)}?"):
        raise typer.Exit(1)
    if state.phase == "ready":
        _stop_training(gcloud)
    lifecycle.delete(gcloud, state)
    for name in others if dead else []:
        gcloud.delete_request(name)
    say(console, f"deleted {', '.join(doomed)}")


@pod_app.command("manifest", cls=TakesOverrides)
def manifest(
    config: ConfigFile,
    overrides: Overrides = None,
    run: RunUrl = "",
    slice_name: Annotated[str | None, typer.Option("--slice", help="For GKE: a TPU slice, like `v6e-16`.")] = None,
    image: Annotated[str | None, typer.Option(help="For GKE: a container image with tinypod installed.")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="An sbatch script instead.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="With --slurm.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="With --slurm: also the processes on a node.")] = 8,
    time: Annotated[str | None, typer.Option(help="With --slurm: the limit, like `24:00:00`.")] = None,
    partition: Annotated[str | None, typer.Option(help="With --slurm.")] = None,
    name: Annotated[str, typer.Option(help="Of the job.")] = "tinypod",
    spot: Annotated[bool, typer.Option("--spot", help="For GKE: on spot nodes.")] = False,
    service_account: Annotated[str | None, typer.Option(help="For GKE: Kubernetes' service account.")] = None,
    queue: Annotated[str | None, typer.Option(help="For GKE: Kueue's local queue.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Starts after the first one.")] = 20,
) -> None:
    """Print a JobSet for GKE, or an sbatch script for Slurm, that trains this config, or the runs of this study.

    Examples: `tinypod pod manifest trm/sudoku_mlp data.path=gs://b/sudoku --run gs://b/x --slice v6e-16 --image IMAGE
    | kubectl apply -f -`, `tinypod pod manifest demo --run /shared/runs/x --slurm --nodes 2 > job.sh`.
    """
    from tinypod.planning.slices import find_slice
    from tinypod.pod.manifest import CONFIG_FOLDER, JobSet, Sbatch

    if slurm:
        if not run:
            raise UserError("--run: say where the run is stored: a folder that all nodes see, or gs://BUCKET/FOLDER")
        apart = _job(config, overrides, run).apart  # says what is wrong with the config, too
        words = ["study", "run", config, *(overrides or []), f"--folder={run}", f"--workers={nodes}"]
        words = words if apart else ["train", config, *(overrides or []), f"--run={run}"]
        text = Sbatch(
            name, nodes, gpus_per_node, ["tinypod", *words], time, partition, max_restarts, apart=apart
        ).render()
    else:
        _check_run(run)
        job = _job(config, overrides, run, folder=f"{CONFIG_FOLDER}/")
        _check_configs(job)
        if slice_name is None or image is None:
            raise UserError("a JobSet needs --slice (like v6e-16) and --image; an sbatch script, --slurm")
        text = JobSet(
            name, find_slice(slice_name), image, job, spot, service_account, queue, max_restarts=max_restarts
        ).render()
    print(text, end="")


def _job(config: str, overrides: list[str] | None, place: str, *, folder: str = "", supervise: bool = False) -> "Job":
    from tinypod.pod.job import study_job, train_job
    from tinypod.study.file import is_study

    if not is_study(config):
        return train_job(load_config(config, overrides), place, folder=folder, supervise=supervise)
    if supervise:
        raise UserError("--supervise is for one run: what a worker of a study leaves, the others take over")
    return study_job(config, overrides or [], place, folder=folder)


def _gcloud(spec: str, dry_run: bool) -> "Gcloud":
    from tinypod import config as configs
    from tinypod.pod.gcloud import Gcloud
    from tinypod.pod.spec import PodSpec

    if not Path(spec).is_file():
        raise UserError(f"SPEC: no file {Path(spec).absolute()}; copy examples/pod.yaml and write your project into it")
    return Gcloud(configs.load(Path(spec), [], PodSpec), dry_run)


def _check_run(run: str) -> None:
    from tinypod.runs import storage

    if not run or not storage.is_remote(run):
        raise UserError(
            f"--run {run or '(not given)'}: expected gs://BUCKET/FOLDER; all workers write there, and a worker's "
            "own disk is deleted with it"
        )


def _check_configs(job: "Job") -> None:
    """Paths in a config must mean the same on a worker as here, and its mesh must be one slice's."""
    for config in job.configs:
        _check_paths_in(config)
        if config.mesh.slices > 1:
            raise UserError(
                f"mesh.slices={config.mesh.slices}: `tinypod pod` trains on one slice; set mesh.slices=1, or start "
                "`tinypod train` on every host of all slices yourself (docs/pods.md)"
            )


def _check_paths_in(section: Any, prefix: str = "") -> None:
    from tinypod.config import Config
    from tinypod.runs import storage

    for name, value in section:
        if isinstance(value, Config):
            _check_paths_in(value, f"{prefix}{name}.")
        elif (
            name == "path" and isinstance(value, str) and not storage.is_remote(value) and not Path(value).is_absolute()
        ):
            raise UserError(
                f"{prefix}{name}={value} is a path on this machine; workers need gs://BUCKET/FOLDER, or an absolute "
                "path on a disk that they have"
            )


def _stop_training(gcloud: "Gcloud") -> None:
    from tinypod.pod.keep import GRACE_S
    from tinypod.pod.workers import Workers

    workers = Workers(gcloud)
    try:
        if any(report.state == "running" for report in workers.reports(with_logs=False)):
            say(console, "stopping the training, so that it saves")
            workers.stop(GRACE_S)
    except UserError as error:
        say(console, f"the training could not be stopped first: {error}", "yellow")
