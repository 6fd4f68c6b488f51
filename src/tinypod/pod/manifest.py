"""The same run for schedulers that people have already: a JobSet for GKE, a script for Slurm.

Both restart by the exit codes of `errors.py`: what no restart mends ends the job. Both name an owner of the run that
stays the same over restarts, so that the lease in the bucket is taken over at once (`runs/lease.py`).
"""

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

import yaml

from tinypod.errors import FINAL, UserError
from tinypod.planning.slices import Slice
from tinypod.pod.job import Job
from tinypod.runs.lease import OWNER

# What GKE calls each generation, on the nodes of its pools.
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
NO_RESTART = sorted(FINAL - {0})
STOP_GRACE_S = 120  # between SIGTERM and SIGKILL: a last checkpoint
CONFIG_FOLDER = "/etc/tinypod"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # Kubernetes adds `-slice-0-7-xxxxx`, of 63 in all


@dataclass(frozen=True)
class JobSet:
    """A run, or a study, on one slice of a GKE cluster."""

    name: str
    slice: Slice
    image: str
    job: Job  # with its files in CONFIG_FOLDER
    spot: bool = False
    service_account: str | None = None  # Kubernetes', with access to the bucket
    queue: str | None = None  # Kueue's
    environment: dict[str, str] = field(default_factory=dict)
    max_restarts: int = 20

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(f"--name {self.name}: expected a to z, 0 to 9 and -, beginning with a letter, up to 40")

    def documents(self) -> list[dict[str, Any]]:
        return [self._config_map(), self._job_set()]

    def render(self) -> str:
        return "---\n".join(yaml.safe_dump(document, sort_keys=False) for document in self.documents())

    def _config_map(self) -> dict[str, Any]:
        metadata = {"name": f"{self.name}-config"}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": self.job.files}

    def _job_set(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self.name,
            # One job on one node pool: a slice is a pool of its own.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        }
        if self.queue is not None:
            metadata["labels"] = {"kueue.x-k8s.io/queue-name": self.queue}
        # A failed pod fails its job (backoffLimit 0), and a failed job restarts all pods: what is left of a run that
        # lost a process can only wait, and a study resumes what was saved. Exit codes that no restart mends fail the
        # whole set.
        never = {"action": "FailJobSet", "name": "noRestartHelps", "onJobFailureReasons": ["PodFailurePolicy"]}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                "failurePolicy": {"maxRestarts": self.max_restarts, "rules": [never]},
                "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": self._job()}}],
            },
        }

    def _job(self) -> dict[str, Any]:
        hosts = self.slice.hosts
        codes = {"containerName": "train", "operator": "In", "values": NO_RESTART}
        return {
            "parallelism": hosts,
            "completions": hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
            "template": {"spec": self._pod()},
        }

    def _pod(self) -> dict[str, Any]:
        selector = {
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[self.slice.generation.name],
            "cloud.google.com/gke-tpu-topology": self.slice.topology_name,
        }
        if self.spot:
            selector["cloud.google.com/gke-spot"] = "true"
        chips = self.slice.chips // self.slice.hosts
        variables = {OWNER: f"jobset {self.name}", **self.job.environment(self.slice), **self.environment}
        # A worker of a study has its number from the index that Kubernetes gives to its pod.
        workers = [f"--workers={self.slice.hosts}"] if self.job.apart else []
        container = {
            "name": "train",
            "image": self.image,
            "command": ["tinypod", *self.job.command, *workers],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "resources": {"requests": {"google.com/tpu": chips}, "limits": {"google.com/tpu": chips}},
            "volumeMounts": [{"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}],
        }
        pod: dict[str, Any] = {
            "restartPolicy": "Never",  # a failure policy needs it; the JobSet restarts
            "terminationGracePeriodSeconds": STOP_GRACE_S,
            "hostNetwork": True,  # as Google's examples: the hosts' own network, without an overlay
            "dnsPolicy": "ClusterFirstWithHostNet",
            "nodeSelector": selector,
            "containers": [container],
            "volumes": [{"name": "config", "configMap": {"name": f"{self.name}-config"}}],
        }
        if self.service_account is not None:
            pod["serviceAccountName"] = self.service_account
        return pod


@dataclass(frozen=True)
class Sbatch:
    """On a Slurm cluster: a run with one process a GPU, as JAX counts them there; a study with one a node."""

    name: str
    nodes: int
    gpus_per_node: int
    command: list[str]  # `tinypod train ...`, `tinypod study run ...`
    time: str | None = None
    partition: str | None = None
    max_restarts: int = 20
    apart: bool = False  # a study: the nodes share its runs

    def __post_init__(self) -> None:
        # These stand in comments that sbatch reads, where nothing can be quoted.
        for option, value in (("--name", self.name), ("--time", self.time), ("--partition", self.partition)):
            if value is not None and not re.fullmatch(r"[\w.:,-]+", value):
                raise UserError(f"{option} {value!r}: expected letters, digits and .:,-_ only")

    def render(self) -> str:
        options = [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={1 if self.apart else self.gpus_per_node}",
            f"--gpus-per-node={self.gpus_per_node}",
            *([f"--time={self.time}"] if self.time else []),
            *([f"--partition={self.partition}"] if self.partition else []),
            "--output=%x-%j.log",
            "--open-mode=append",
            "--requeue",
            f"--signal=TERM@{STOP_GRACE_S}",
        ]
        never = "|".join(str(code) for code in sorted(FINAL))
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {option}" for option in options),
                "",
                "# The same owner after each requeue: the lease of a run in a bucket is taken over at once.",
                f'export {OWNER}="slurm job $SLURM_JOB_ID"',
                "",
                "# Before the time is up Slurm sends SIGTERM to the processes: they save and end with 143.",
                f"srun --kill-on-bad-exit={int(not self.apart)} {shlex.join(self.command)}",
                "code=$?",
                "",
                'case "$code" in',
                f'  {never}) exit "$code" ;;  # done, or no restart helps (docs/reliability.md)',
                "esac",
                f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.max_restarts} ]; then',
                '  scontrol requeue "$SLURM_JOB_ID"',
                "fi",
                'exit "$code"',
                "",
            ]
        )
