"""What the hosts of a slice are to do: train one run together, or share the runs of a study.

The hosts of a study compute apart, each with its own chips: nothing is exchanged between them, one that is lost takes
only its own runs with it, and the others go on with those (`study/claims.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tinypod import config as configs
from tinypod.experiment import ExperimentConfig
from tinypod.planning.slices import Slice
from tinypod.study.file import Study, load_study, written_out

CONFIG = "config.yaml"


@dataclass(frozen=True)
class Job:
    place: str  # gs:// of the run, or of the study
    files: dict[str, str]  # that the command reads, by name
    command: tuple[str, ...]  # of tinypod
    configs: tuple[ExperimentConfig, ...]  # of all its runs
    apart: bool = False  # each host computes for itself, and is told its number

    def environment(self, slice_: Slice) -> dict[str, str]:
        """libtpu waits for all hosts of a slice, unless it is told that there is only this one."""
        if not self.apart:
            return {}
        bounds = ",".join(map(str, slice_.host_bounds))
        alone = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds}
        return alone | {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}


def train_job(config: ExperimentConfig, place: str, *, folder: str = "", supervise: bool = False) -> Job:
    """`folder`: where a host has the files."""
    command = ("train", f"{folder}{CONFIG}", f"--run={place}", *(["--supervise"] if supervise else []))
    return Job(place, {CONFIG: configs.dump(config)}, command, (config,))


def study_job(name: str, overrides: Sequence[str], place: str, *, folder: str = "") -> Job:
    study: Study = load_study(name, overrides)
    of_all = tuple(run.config for run in study.runs)
    command = ("study", "run", f"{folder}{study.name}.yaml", f"--folder={place}")
    return Job(place, written_out(name, overrides), command, of_all, apart=True)
