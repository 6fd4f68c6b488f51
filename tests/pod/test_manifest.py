"""The manifest for GKE against the schema of JobSet; the script for Slurm in a real shell."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from test_gcloud import HOSTILE

from tinypod import config as configs
from tinypod.errors import EXIT_CODES, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.planning.slices import all_slices, find_slice
from tinypod.pod.job import study_job, train_job
from tinypod.pod.manifest import CONFIG_FOLDER, JobSet, Sbatch
from tinypod.study.file import load_study

DEMO = configs.load("demo", ["data.path=gs://b/d"], ExperimentConfig)
SCHEMA = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())


def strict(schema: Any) -> Any:
    """As an API server reads it with strict validation: no field that is not named, numbers or words where it says."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(part) for key, part in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False) is True:
        return {"type": ["integer", "string"]}
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


VALIDATOR = jsonschema.Draft202012Validator(strict(SCHEMA))


def problems(document: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(document)]


def job_set(slice_name: str = "v6e-16", **changes: Any) -> JobSet:
    fields = {
        "name": "sudoku",
        "slice": find_slice(slice_name),
        "image": "reg/img:1",
        "job": train_job(DEMO, "gs://b/x", folder=f"{CONFIG_FOLDER}/"),
    }
    return JobSet(**{**fields, **changes})


def pod_of(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job, job["template"]["spec"]


@pytest.mark.parametrize("name", [one.name for one in all_slices()])
def test_every_slice_s_manifest_is_valid(name: str) -> None:
    more = {"spot": True, "service_account": "trainer", "queue": "tpus", "environment": {"A": "b"}}
    config_map, document = yaml.safe_load_all(job_set(name, **more).render())
    assert problems(document) == []
    assert yaml.safe_load(config_map["data"]["config.yaml"])["data"]["path"] == "gs://b/d"
    job, pod = pod_of(document)
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"] == find_slice(name).hosts
    assert chips * job["parallelism"] == find_slice(name).chips
    assert len(pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")) == (
        2 if name.startswith(("v5e", "v6e")) else 3
    )


def test_the_check_sees_what_is_wrong() -> None:
    """The schema and its reader are worth something."""
    for spoil, said in (
        (
            lambda d: d["spec"].update(replicas=3),
            "$.spec: Additional properties are not allowed ('replicas' was unexpected)",
        ),
        (
            lambda d: d["spec"]["failurePolicy"].update(maxRestarts="3"),
            "$.spec.failurePolicy.maxRestarts: '3' is not of type 'integer'",
        ),
        (
            lambda d: d["spec"]["failurePolicy"]["rules"][0].update(action="Fail"),
            "rules[0].action: 'Fail' is not one of",
        ),
        (lambda d: pod_of(d)[1]["containers"][0].pop("name"), "containers[0]: 'name' is a required property"),
        (lambda d: pod_of(d)[1]["nodeSelector"].update(x=True), "nodeSelector.x: True is not of type 'string'"),
    ):
        document = job_set().documents()[1]
        spoil(document)
        assert any(said in line for line in problems(document)), said


def test_selectors_restarts_and_environment() -> None:
    _, document = job_set("v4-64", spot=True).documents()
    job, pod = pod_of(document)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
        "cloud.google.com/gke-tpu-topology": "2x4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["restartPolicy"] == "Never"
    (rule,) = job["podFailurePolicy"]["rules"]
    final = [code for code, end in EXIT_CODES.items() if end.restart == "never" and code]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == sorted(final)
    assert {"name": "TINYPOD_OWNER", "value": "jobset sudoku"} in pod["containers"][0]["env"]
    assert pod["containers"][0]["command"][-1] == "--run=gs://b/x"


def test_the_hosts_of_a_study_compute_apart(tmp_path: Path) -> None:
    """Each with its own chips, its number from Kubernetes; and the study is the same from the files that go along."""
    name, overrides = "studies/paper_ablations", ["data.path=gs://b/d", "steps=100"]
    job = study_job(name, overrides, "gs://b/x", folder=f"{CONFIG_FOLDER}/")
    config_map, document = job_set("v5e-16", job=job).documents()
    assert problems(document) == []
    container = pod_of(document)[1]["containers"][0]
    words = ["tinypod", "study", "run", "/etc/tinypod/paper_ablations.yaml", "--folder=gs://b/x", "--workers=4"]
    assert container["command"] == words
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert (variables["TPU_PROCESS_BOUNDS"], variables["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == ("1,1,1", "2,2,1")
    for file, text in config_map["data"].items():
        (tmp_path / file).write_text(text)
    assert load_study(tmp_path / "paper_ablations.yaml").runs == load_study(name, overrides).runs
    (tmp_path / "words.yaml").write_text('{base: demo, variants: {"1e-3": {optimizer.learning_rate: 1e-3}, "on": {}}}')
    for file, text in study_job(str(tmp_path / "words.yaml"), [], "gs://b/x").files.items():
        (tmp_path / file.replace("words.", "sent.")).write_text(text)
    assert load_study(tmp_path / "sent.yaml").runs == load_study(tmp_path / "words.yaml").runs


def test_slurm_starts_one_worker_of_a_study_a_node(tmp_path: Path) -> None:
    script = Sbatch("s", 3, 8, ["tinypod", "study", "run", "f.yaml", "--workers=3"], apart=True).render()
    assert "#SBATCH --ntasks-per-node=1\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert in_a_shell(script, tmp_path, 0)[1][0][2:4] == ["--kill-on-bad-exit=0", "tinypod"]


@pytest.mark.parametrize("name", ["Sudoku", "a" * 41, "a_b", "-a", "", "a b"])
def test_names_that_kubernetes_would_refuse(name: str) -> None:
    with pytest.raises(UserError, match="--name"):
        job_set(name=name)


def in_a_shell(script: str, folder: Path, code: int, restarts: int = 0) -> tuple[int, list[list[str]]]:
    """Run it with a `srun` that ends so; returns the exit code and what `srun` and `scontrol` were given."""
    for name in ("srun", "scontrol"):
        program = folder / name
        ends = code if name == "srun" else 0
        program.write_text(
            f'#!/bin/bash\nprintf \'%s\\0\' {name} "$TINYPOD_OWNER" "$@" >> calls\necho -n X >> calls\nexit {ends}\n'
        )
        program.chmod(0o755)
    (folder / "job.sh").write_text(script)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    environment["SLURM_RESTART_COUNT"] = str(restarts)
    ended = subprocess.run(["bash", "job.sh"], cwd=folder, env=environment, check=False)
    calls = (folder / "calls").read_text().split("\0X")
    (folder / "calls").unlink()
    return ended.returncode, [call.split("\0") for call in calls if call]


@pytest.mark.parametrize("code", sorted(EXIT_CODES))
def test_slurm_requeues_by_exit_code(tmp_path: Path, code: int) -> None:
    script = Sbatch("sudoku", 2, 8, ["tinypod", "train", "demo", "--run=/shared/x"], "24:00:00").render()
    ended, calls = in_a_shell(script, tmp_path, code)
    assert ended == code
    assert calls[0] == ["srun", "slurm job 17", "--kill-on-bad-exit=1", "tinypod", "train", "demo", "--run=/shared/x"]
    requeued = calls[1:] == [["scontrol", "slurm job 17", "requeue", "17"]]
    assert requeued == (EXIT_CODES[code].restart != "never")
    assert in_a_shell(script, tmp_path, code, restarts=20)[1][1:] == []


def test_hostile_words_reach_slurm_s_processes_unchanged(tmp_path: Path) -> None:
    ended, calls = in_a_shell(Sbatch("x", 1, 1, ["tinypod", *HOSTILE]).render(), tmp_path, 0)
    assert ended == 0
    assert calls[0][3:] == ["tinypod", *HOSTILE]
    assert not (tmp_path / "pwned").exists()
    for word in HOSTILE[:5]:
        with pytest.raises(UserError, match="--partition"):
            Sbatch("x", 1, 1, [], partition=word)
