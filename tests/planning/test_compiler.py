"""Every shipped config, compiled by the TPU compiler for a slice that is not there; recursion is shortened and language
models are made small, to take seconds. What must hold of every step: one reduction of gradients, no activations sent
over the data axis, the state donated."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import pytest

from fixtures import CONFIGS
from tinypod import experiment, step
from tinypod.config import load
from tinypod.errors import ConfigError, DeadlineError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.planning import compiler as tpu_compiler
from tinypod.planning import slices
from tinypod.planning.analysis import Analysis
from tinypod.sharding import MeshConfig
from tpu import needs_compiler

SHORT = ("model.H_cycles=1", "model.L_cycles=1", "data.path=nowhere")
SMALL = ("model.hidden_size=128", "model.puzzle_embedding.width=128", "batch_size=64")  # the time goes with the sizes
SLICES = {"demo": "v4-8", "sudoku_mlp": "v5e-8", "sudoku_attention": "v6e-4"}  # others: v5p-8
SHIPPED = [
    pytest.param(path, id=path.stem, marks=() if path.stem == "demo" else pytest.mark.slow)
    for path in sorted(CONFIGS.rglob("*.yaml"))
    if path.name != "base.yaml" and path.parent.name not in ("distill", "studies")
]
LANGUAGE_MODELS = sorted(CONFIGS.glob("distill/*.yaml"))
SMALL_LANGUAGE_MODEL = (
    "data.path=nowhere",
    *(f"model.{size}" for size in ("vocab_size=1024", "hidden_size=256", "num_layers=4", "mlp_size=512")),
)
SLICES |= {"lora_v6e4": "v6e-4", "lora_v6e8": "v6e-8", "qat_v6e4": "v6e-4"}
SLICES |= {"qwen3_8b": "v5p-32", "qwen3_32b": "v5p-128"}  # other language models: v6e-1


@pytest.fixture(autouse=True)
def _as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION", "NPROC"):  # the suite's own settings
        monkeypatch.delenv(name)


def compile_for(path: Path, target: str, *overrides: str) -> tuple[ExperimentConfig, Analysis]:
    config = load(path, [*SHORT, *overrides], ExperimentConfig)
    return config, tpu_compiler.compile_for(config, slices.find_slice(target))


def build_on_one_device(config: ExperimentConfig) -> experiment.Experiment:
    return experiment.build(config.model_copy(update={"mesh": MeshConfig(devices=1)}), planned=True)


def trained_bytes(config: ExperimentConfig) -> int:
    built = build_on_one_device(config)
    trained = step.select_trained(built.task, built.abstract_state.params)
    return sum(4 * int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(trained))


@needs_compiler
@pytest.mark.parametrize("path", SHIPPED)
def test_every_shipped_config_compiles_for_a_slice(path: Path) -> None:
    target = SLICES.get(path.stem, "v5p-8")
    config, found = compile_for(path, target, *(() if path.stem == "demo" else SMALL))
    check_step(config, found, target)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sudoku_mlp", "sudoku_attention"])
def test_the_recipes_compile_as_they_are_for_a_v4_64(name: str) -> None:
    path = CONFIGS / "trm" / f"{name}.yaml"
    config = load(path, ["data.path=nowhere", "batch_size=6144"], ExperimentConfig)
    check_step(config, tpu_compiler.compile_for(config, slices.find_slice("v4-64")), "v4-64")


def check_step(config: ExperimentConfig, found: Analysis, target: str) -> None:
    work = found.work
    assert work is not None
    assert found.mesh == {"data": slices.find_slice(target).devices, "pipeline": 1, "fsdp": 1, "tensor": 1}
    assert {(traffic.op, traffic.axes) for traffic in work.exchanges()} == {("all-reduce", ("data",))}
    [reduction] = work.exchanges()
    gradients = trained_bytes(config)
    assert gradients <= reduction.payload_bytes < 1.01 * gradients + 8192  # sums for metrics, rows of the puzzle table
    assert reduction.runs <= 2  # the gradients, and the count of rows of the puzzle table
    built = build_on_one_device(config)
    changed = len(jax.tree.leaves(built.abstract_state)) - len(jax.tree.leaves(built.abstract_state.params["z_init"]))
    assert changed <= len(work.aliased)
    assert work.unwanted == ()
    assert work.unknown_loops == ()
    assert work.opaque_calls == ()
    assert sum(kernel.cycles or 0 for kernel in work.kernels) > 0
    assert 0 < found.memory.needed < slices.find_slice(target).generation.usable_bytes


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("path", LANGUAGE_MODELS, ids=lambda path: path.stem)
def test_every_language_model_compiles_for_its_slice(path: Path) -> None:
    target = SLICES.get(path.stem, "v6e-1")
    small = () if path.stem == "tiny" or path.stem.startswith("demo") else SMALL_LANGUAGE_MODEL
    config, found = compile_language_model(path, target, *small)
    work = found.work
    assert work is not None
    over_data = [traffic for traffic in work.exchanges() if "data" in traffic.axes]
    gradients = trained_bytes(config)
    if found.mesh["data"] > 1:
        [reduction] = over_data
        assert reduction.op == "all-reduce"
        assert gradients <= reduction.payload_bytes < gradients + 8192  # and the sums for metrics
    else:
        assert over_data == []
    assert any(traffic.op == "all-gather" for traffic in work.exchanges()) == (found.mesh["fsdp"] > 1)


@needs_compiler
@pytest.mark.slow
def test_a_pipeline_hands_activations_on_and_gathers_no_weights() -> None:
    path = CONFIGS / "distill" / "qwen3_32b.yaml"
    staged = ("mesh={data: 1, pipeline: 4, fsdp: 1, tensor: 4}", "accumulation=16", "batch_size=16")
    _, found = compile_language_model(path, "v5p-32", *SMALL_LANGUAGE_MODEL, *staged)
    assert found.work is not None
    assert found.mesh == {"data": 1, "pipeline": 4, "fsdp": 1, "tensor": 4}
    handed = [one for one in found.work.exchanges() if one.op == "collective-permute" and one.axes == ("pipeline",)]
    assert sum(one.runs for one in handed) == 2 * (16 + 4 - 1)  # every turn, forward and backward
    assert not any(one.op == "all-gather" and "fsdp" in one.axes for one in found.work.exchanges())


def compile_language_model(path: Path, target: str, *overrides: str) -> tuple[ExperimentConfig, Analysis]:
    config = load(path, overrides, ExperimentConfig)
    found = tpu_compiler.compile_for(config, slices.find_slice(target))
    work = found.work
    assert work is not None
    assert all("?" not in traffic.axes for traffic in work.exchanges()), work.collectives
    built = build_on_one_device(config)
    frozen = len(jax.tree.leaves(built.abstract_state.params)) - len(
        jax.tree.leaves(step.select_trained(built.task, built.abstract_state.params))
    )
    assert len(jax.tree.leaves(built.abstract_state)) - frozen <= len(work.aliased)
    assert work.unwanted == ()
    assert work.unknown_loops == ()
    assert set(work.opaque_calls) <= {"tpu_custom_call"}  # attention
    assert 0 < found.memory.needed < slices.find_slice(target).generation.usable_bytes
    return config, found


@pytest.mark.slow
@needs_compiler
def test_fsdp_and_tensor_collectives_stay_on_their_axes() -> None:
    """Weights are gathered over fsdp and partial sums added over tensor; no more than that crosses the data axis."""
    config, found = compile_for(
        CONFIGS / "trm" / "sudoku_attention.yaml",
        "v5e-8",
        "mesh={data: 2, fsdp: 2, tensor: 2}",
        *SMALL,
    )
    work = found.work
    assert work is not None
    assert all("?" not in traffic.axes for traffic in work.exchanges()), work.collectives
    ops = {(traffic.op, traffic.axes) for traffic in work.exchanges()}
    assert any(op == "all-gather" and axes == ("fsdp",) for op, axes in ops), ops
    assert any(op == "all-reduce" and "tensor" in axes for op, axes in ops), ops
    over_data = [traffic for traffic in work.exchanges() if "data" in traffic.axes]
    assert {traffic.op for traffic in over_data} == {"all-reduce"}
    assert sum(traffic.payload_bytes for traffic in over_data) <= trained_bytes(config)
    assert work.unwanted == ()


@pytest.mark.slow
@needs_compiler
def test_only_gradients_cross_slices() -> None:
    config = load(CONFIGS / "demo.yaml", [*SHORT, "mesh={slices: 2, fsdp: 2}"], ExperimentConfig)
    work = tpu_compiler.compile_for(config, slices.find_slice("v4-8").times(2)).work
    assert work is not None
    assert all("?" not in traffic.axes for traffic in work.exchanges()), work.collectives
    crossing = [traffic for traffic in work.exchanges() if traffic.axes == ("slices",)]
    assert {traffic.op for traffic in crossing} == {"all-reduce"}
    assert sum(traffic.payload_bytes for traffic in crossing) <= trained_bytes(config)
    assert work.unwanted == ()


@needs_compiler
def test_a_step_that_does_not_fit_says_by_how_much() -> None:
    _, found = compile_for(CONFIGS / "trm" / "sudoku_mlp.yaml", "v5e-1", "batch_size=32768", "model.unroll=false")
    assert found.work is None
    assert found.memory.needed > slices.find_slice("v5e-1").generation.usable_bytes
    assert found.memory.state < found.memory.needed
    assert found.memory.activations > 0


@needs_compiler
def test_the_compiler_is_known_by_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not by where it lies: JAX points to the package's library when it is imported."""
    assert tpu_compiler.compiler_version() == version("libtpu")
    own = tmp_path / "libtpu.so"
    own.write_bytes(b"")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(own))
    assert tpu_compiler.compiler_version().startswith(f"{own} of ")


@needs_compiler
def test_what_the_child_refuses_is_an_error_here() -> None:
    with pytest.raises(ConfigError, match="does not divide dimension"):
        compile_for(CONFIGS / "demo.yaml", "v4-8", "mesh.fsdp=4", "model.hidden_size=90")


def test_the_compiler_is_asked_for_a_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a name: one host of a slice, or two slices, have no name in the table."""
    asked: list[dict] = []
    refused = '\nTINYPOD_ANSWER {"error": "no", "kind": "ConfigError"}'

    def ask(request: str, *rest: object) -> tuple[str, str, int]:
        asked.append(json.loads(request))
        return refused, "", 0

    monkeypatch.setattr(tpu_compiler, "_ask", ask)
    target = slices.find_slice("v4-64").times(2)
    with pytest.raises(ConfigError, match="no"):
        tpu_compiler.compile_for(load(CONFIGS / "demo.yaml", SHORT, ExperimentConfig), target)
    assert asked[0]["topology"] == target.topology_arguments() | {"chips_per_host_bounds": [2, 2, 1]}
    assert asked[0]["topology"]["num_slices"] == 2


def test_a_compilation_that_takes_too_long_is_given_up() -> None:
    config = load(CONFIGS / "demo.yaml", SHORT, ExperimentConfig)
    with pytest.raises(DeadlineError, match="compiling for v4-8 took longer"):
        tpu_compiler.compile_for(config, slices.find_slice("v4-8"), timeout_s=0.1)


def test_a_compiler_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As libtpu does at some topologies: an abort, without a Python exception."""
    config = load(CONFIGS / "demo.yaml", SHORT, ExperimentConfig)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match=r"ended with code -6 while compiling for v4-8:\s+last words"):
        tpu_compiler.compile_for(config, slices.find_slice("v4-8"))


PARENT = """
import sys, time
from tinypod.planning import compiler
child = compiler.start_child()
if sys.argv[1] == "later":
    child.stdin.write(" " * 2**20)  # more than a pipe holds: done when the child, all its imports made, reads
    child.stdin.flush()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def orphans_are_ours() -> Iterator[None]:
    """Linux hands the orphans of our children to us, who can then wait for their end."""
    prctl, subreaper = ctypes.CDLL(None).prctl, 36
    prctl(subreaper, 1)
    yield
    prctl(subreaper, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_parent_that_is_killed_leaves_no_compiler_behind(orphans_are_ours: None, when: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, when], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (-signal.SIGKILL, 137)  # by the kernel, or by itself before anything was imported
