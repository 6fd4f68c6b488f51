"""What others measured on TPUs beside what `tinypod plan` predicts. Needs the TPU compiler to predict, and no TPU.

    python benchmarks/published.py                 # the table, from what is kept in published.json
    python benchmarks/published.py predict v6e-8   # compile and predict the rows whose names have that in them; all: ''

Rows, their sources and the published figures are in `published.yaml`. A prediction is committed before its figure is
looked up: the history of the two files shows it. Single operations are compiled as such. Training steps are those of
our language model in the sizes, batch, length and sharding of the source; where the source keeps activations in the
hosts' memory, ours are computed again, and where a batch does not fit without that, it is computed in parts.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tinypod import config as configs
from tinypod.config import Config
from tinypod.errors import UserError
from tinypod.experiment import ExperimentConfig
from tinypod.planning.compiler import ALONE, compiler_version
from tinypod.planning.planner import Planner, Prediction, predict_for
from tinypod.planning.slices import find_slice

ROWS, KEPT = (Path(__file__).with_name(f"published.{kind}") for kind in ("yaml", "json"))
MIB = 2**20


class Figure(Config):
    """As it was published, in one of these units."""

    s: PositiveFloat | None = None
    ms: PositiveFloat | None = None
    gb_per_s: PositiveFloat | None = None  # of a device: read and written
    tflops: PositiveFloat | None = None  # a second and chip, as MaxText counts them

    @model_validator(mode="after")
    def _one_unit(self) -> "Figure":
        if sum(value is not None for value in (self.s, self.ms, self.gb_per_s, self.tflops)) != 1:
            raise ValueError("a figure has one unit: s, ms, gb_per_s or tflops")
        return self


class Row(Config):
    slice: str
    source: str
    fitted: bool = False
    seen: bool = False  # the figure was known before the prediction was made
    published: Figure | None = None

    @property
    def name(self) -> str:
        raise NotImplementedError


class Kernel(Row):
    op: Literal["copy", "product", "psum"]
    mib: PositiveInt | None = None
    size: PositiveInt | None = None  # of a square matrix

    @property
    def name(self) -> str:
        what = f"{self.mib} MiB" if self.mib else " x ".join([str(self.size)] * 3)
        return f"{self.slice}, {self.op} of {what}"

    def published_s(self) -> float | None:
        figure = self.published
        if figure is None:
            return None
        if figure.gb_per_s is not None:
            assert self.mib is not None
            return 2 * self.mib * MIB / (1e9 * figure.gb_per_s)
        assert figure.ms is not None
        return figure.ms / 1e3


class Size(Config):
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    mlp_size: PositiveInt
    head_dim: PositiveInt = 128


class Training(Row):
    model: str
    length: PositiveInt
    rows: PositiveInt  # sequences of a chip in a step
    tensor: PositiveInt = 1
    remat: bool = True
    flags: Annotated[list[str], Field(default_factory=list)]  # names of the compiler's, see the file

    @property
    def name(self) -> str:
        return f"{self.slice}, {self.model}, {self.rows} x {self.length} tokens a chip"

    def published_s(self, size: Size) -> float | None:
        figure = self.published
        if figure is None or figure.s is not None:
            return None if figure is None else figure.s
        assert figure.tflops is not None
        return self.flops(size) / (1e12 * figure.tflops)

    def flops(self, size: Size) -> float:
        """Of a chip in a step, as MaxText counted them then: every pair of positions, not the causal half."""
        heads = (2 * size.num_heads + 2 * size.num_kv_heads) * size.head_dim
        weights = size.num_layers * size.hidden_size * (heads + 3 * size.mlp_size) + size.vocab_size * size.hidden_size
        attention = 2 * size.num_layers * self.length * size.num_heads * size.head_dim
        return 6 * self.rows * self.length * (weights + attention)

    def overrides(self, size: Size, parts: int) -> list[str]:
        chips = find_slice(self.slice).chips
        return [
            *(f"model.{key}={value}" for key, value in size),
            f"model.remat={str(self.remat).lower()}",
            f"batch_size={self.rows * chips}",
            f"accumulation={parts}",
            f"mesh={{data: 1, fsdp: -1, tensor: {self.tensor}}}",
            f"data.expected={{length: {self.length}, topk: null, rows: 1000000, held_out_rows: 1000}}",
        ]


class File(Config):
    models: dict[str, Size]
    flags: dict[str, list[str]]
    kernels: list[Kernel]
    training: list[Training]


class Predicted(Config):
    """One of the predictions that are kept."""

    s: PositiveFloat
    least_s: Annotated[float, Field(ge=0)]
    most_s: PositiveFloat
    hidden_s: Annotated[float, Field(ge=0)]
    shares: dict[str, float]
    parts: PositiveInt = 1  # that the batch is computed in
    gib: PositiveFloat | None = None
    utilisation: PositiveFloat | None = None
    date: str
    compiler: str


def predict_kernel(row: Kernel) -> dict[str, Any]:
    os.environ.update(ALONE)
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from tinypod import sharding
    from tinypod.planning import analysis
    from tinypod.planning.hlo.program import read

    target = find_slice(row.slice)
    devices = topologies.get_topology_desc(**target.topology_arguments()).devices
    mesh = sharding.make_mesh(sharding.MeshConfig(), devices if row.op == "psum" else devices[:1])
    elements = (row.size, row.size) if row.size else ((row.mib or 0) * MIB // 2 // 1024, 1024)
    x = jax.ShapeDtypeStruct(elements, jnp.bfloat16, sharding=sharding.replicated(mesh))
    if row.op == "copy":
        lowered = jax.jit(lambda x: x.copy()).lower(x)
    elif row.op == "product":
        lowered = jax.jit(lambda a, b: a @ b).lower(x, x)
    else:
        on_each = partial(jax.shard_map, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        lowered = jax.jit(on_each(lambda x: jax.lax.psum(x, "data"))).lower(x)
    program = read(lowered.compile().as_text() or "", dict(mesh.shape), analysis.coordinates(mesh))
    return kept(predict_for(program, target), f"libtpu {compiler_version()}")


def predict_training(row: Training, size: Size, flags: list[str]) -> dict[str, Any]:
    """In as few parts as fit."""
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--{flag}" for flag in flags)  # of the compiler's process, too
    from rich.console import Console

    from tinypod.planning.prices import read_prices

    with contextlib.ExitStack() as stack:
        console = Console(file=stack.enter_context(open(os.devnull, "w")))
        together = row.rows * row.tensor  # of the chips that share a layer's width
        for parts in (number for number in range(1, together + 1) if together % number == 0):
            config = configs.load("distill/qwen3_8b", row.overrides(size, parts), ExperimentConfig)
            plan = Planner(config, read_prices(None), console).plan(find_slice(row.slice))
            if plan.fits and plan.prediction is not None:
                gib = plan.analysis.memory.needed / 2**30
                found = kept(plan.prediction, f"libtpu {compiler_version()}")
                return found | {"parts": parts, "gib": gib, "utilisation": plan.utilisation}
    raise UserError(f"{row.name}: does not fit, one sequence at a time: {plan}")


def kept(prediction: Prediction, compiler: str) -> dict[str, Any]:
    return {
        "s": prediction.step_s,
        "least_s": prediction.least_s,
        "most_s": prediction.most_s,
        "hidden_s": prediction.hidden_s,
        "shares": {name: round(share, 4) for name, share in prediction.shares.items()},
        "date": datetime.date.today().isoformat(),
        "compiler": compiler,
    }


def read_kept() -> dict[str, Predicted]:
    found = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return {name: Predicted.model_validate(row) for name, row in found.items()}


def predict(rows: File, wanted: str, workers: int) -> None:
    done = read_kept()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        asked = {pool.submit(predict_kernel, row): row.name for row in rows.kernels if wanted in row.name}
        asked |= {
            pool.submit(
                predict_training, row, rows.models[row.model], [one for name in row.flags for one in rows.flags[name]]
            ): row.name
            for row in rows.training
            if wanted in row.name
        }
        for future in as_completed(asked):
            name = asked[future]
            try:
                done[name] = Predicted.model_validate(future.result())
            except Exception as error:  # the others go on
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{name}: {1e3 * done[name].s:,.4g} ms", flush=True)
            write(done)


def write(done: dict[str, Predicted]) -> None:
    """Whole or not at all."""
    text = json.dumps({name: done[name].model_dump(exclude_none=True) for name in sorted(done)}, indent=1)
    with tempfile.NamedTemporaryFile("w", dir=KEPT.parent, delete=False) as file:
        file.write(text + "\n")
    os.replace(file.name, KEPT)


def table(rows: File) -> str:
    done = read_kept()
    lines = ["| what | published | predicted | range | ratio | |", "|---|---|---|---|---|---|"]
    measured: list[tuple[Row, float | None]] = [(row, row.published_s()) for row in rows.kernels]
    measured += [(row, row.published_s(rows.models[row.model])) for row in rows.training]
    for row, seconds in measured:
        found = done.get(row.name)
        shown = ["not yet", "", ""] if found is None else [_ms(found.s), f"{_ms(found.least_s)} to {_ms(found.most_s)}"]
        ratio = "" if found is None or seconds is None else f"{found.s / seconds:.2f}"
        notes = [text for flag, text in ((row.fitted, "fitted"), (row.seen, "figure known before")) if flag]
        notes += [f"in {found.parts} parts"] if found is not None and found.parts > 1 else []
        figure = "not looked up" if seconds is None else _ms(seconds)
        lines.append(f"| {row.name} | {figure} | {' | '.join(shown[:2])} | {ratio} | {', '.join(notes)} |")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < 1 else f"{seconds:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predict", nargs="*", help="'predict', and part of the names of the rows to predict")
    parser.add_argument("--workers", type=int, default=2, help="compilers at a time; each takes up to 8 GB")
    arguments = parser.parse_args()
    rows = configs.load(ROWS, [], File)
    if arguments.predict:
        verb, *wanted = arguments.predict
        if verb != "predict" or len(wanted) > 1:
            parser.error("say `predict`, and at most one part of a name")
        predict(rows, wanted[0] if wanted else "", arguments.workers)
    print(table(rows))


if __name__ == "__main__":
    main()
