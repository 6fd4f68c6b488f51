"""A compiler that answers at once, for tests of what is made of its answers."""

from pathlib import Path

import pytest

from tinypod.planning import compiler as tpu_compiler
from tinypod.planning.analysis import Analysis, Memory
from tinypod.planning.gpus import Cards
from tinypod.planning.hlo.program import Collective, Kernel, Program
from tinypod.planning.slices import GIB
from tinypod.sharding import AXES


def install(monkeypatch: pytest.MonkeyPatch, cache: Path, **settings) -> "FakeCompiler":
    """In the TPU compiler's place, with a cache of its own; other settings are another version of it."""
    fake = FakeCompiler(**settings)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(tpu_compiler, "compile_for", fake)
    monkeypatch.setattr(tpu_compiler, "compiler_version", lambda target=None: f"fake {settings}")
    return fake


def work(kernels: list[Kernel], collectives: tuple[Collective, ...] = ()) -> Program:
    return Program(tuple(kernels), collectives, frozenset({0}), unknown_loops=(), opaque_calls=(), unwanted=())


def kernel(runs: int = 1, flops: float = 0, hbm_bytes: float = 0, cycles: int | None = None, **more) -> Kernel:
    return Kernel("fusion", runs, flops, hbm_bytes, cycles, **more)


class FakeCompiler:
    """Needs a state that FSDP splits, and activations that go with the rows; remat leaves a tenth of them for a third
    more time. Counts what it is asked."""

    def __init__(
        self, split_gib: float = 1.0, row_mib: float = 40.0, fixed_gib: float = 0.0, latency_s: float = 0.0
    ) -> None:
        self.split, self.row, self.fixed, self.latency_s = split_gib * GIB, row_mib * 2**20, fixed_gib * GIB, latency_s
        self.asked: list[tuple[str, int, int, bool]] = []

    def __call__(self, config, target, *, tick=None) -> Analysis:
        sizes = dict(zip(AXES, config.mesh.shape(target.devices), strict=True))
        shards = sizes["data"] * sizes["fsdp"]
        remat = config.model.remat
        self.asked.append((target.name, config.accumulation, sizes["fsdp"], remat))
        state = int(self.split / sizes["fsdp"])
        rows = config.batch_size // config.accumulation // shards
        activations = int(rows * self.row * (0.1 if remat else 1.0) + self.fixed)
        fits = state + activations <= target.generation.usable_bytes
        seconds = config.batch_size / shards * 1e-3 * (1.3 if remat else 1.0) * (1 + 0.01 * config.accumulation)
        seconds += self.latency_s
        memory = Memory(
            needed=state + activations,
            weights=state,
            optimizer=0,
            averages=0,
            carry=0,
            data=0,
            activations=activations,
            temporaries=0,
        )
        if isinstance(target, Cards):
            took = kernel(hbm_bytes=seconds * target.generation.reached_bandwidth)
        else:
            took = kernel(cycles=int(seconds * target.generation.clock))
        done = work([took]) if fits else None
        return Analysis(mesh=sizes, coordinates=(), memory=memory, work=done, compile_s=1.0)
