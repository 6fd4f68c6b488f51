"""What part of a TPU's peak the compiler's schedules leave to our kernels. Needs the TPU compiler, and no TPU.

    python benchmarks/kernel_cycles.py

The compiler has no estimate of a Pallas kernel's cycles, so plans take it from its schedules: each kernel is compiled
at the recipes' shape (97 positions, 512 wide, bfloat16), and the instruction bundles of its loops are counted, each as
often as the loop turns. A bundle takes a cycle, or more where the matrix units are still busy: where a loop's products
need more cycles of them than its bundles book, it is longer by that ratio. Waiting for memory is not in it: the plan's
roofline has it. The shares of the peak are those in `kernels/tpu_layers.py`.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tinypod.kernels.tpu_layers import CHIPS
from tinypod.planning.calibration import calibration
from tinypod.planning.compiler import ALONE, compiler_version

TARGETS = {"v4-8": "TPU v4", "v5e-4": "TPU v5 lite", "v5p-8": "TPU v5", "v6e-4": "TPU v6 lite"}
# Multiplications that the matrix units of one core do in a cycle.
PER_CYCLE = {"v4-8": 4 * 128**2, "v5e-4": 4 * 128**2, "v5p-8": 4 * 128**2, "v6e-4": 4 * 256**2}
P, D, F_TOKEN, F_CHANNEL, PARTS = 112, 512, 512, 1536, 3  # positions are padded; the channel MLP goes in parts


class Part(NamedTuple):
    """Of a layer: which program and which of its kernels has it."""

    program: str
    kernel: str
    multiplications: int  # of an example
    backward: bool = False


LAYER = {
    "channel": Part("channels", "channel_mlp", 3 * P * D * F_CHANNEL),
    "channel_backward": Part("channels", "channel_mlp_backward", 5 * P * D * F_CHANNEL),
    "token": Part("tokens", "token_mixing", 3 * P * D * F_TOKEN),
    "token_backward": Part("tokens", "token_mixing_backward", 8 * P * D * F_TOKEN),
    "attention": Part("attention", "recursion_net", 4 * P * D * D + 2 * P * P * D),
}
# JAX's splash attention, one block of queries with one of keys; what plans use is in planning/calibration.yaml.
BLOCK, HEAD = 512, 128
SPLASH = {
    "forward": Part("splash", "splash_mha_fwd_residuals", 2 * BLOCK**2 * HEAD),
    "backward": Part("splash", "splash_mha_dkv_no_residuals", 5 * BLOCK**2 * HEAD),
}

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from tinypod import sharding
from tinypod.kernels import attention, tpu_layers, tpu_net
from tinypod.models import layers, trm
from tinypod.planning import slices

target, program = json.loads(sys.argv[1])
devices = topologies.get_topology_desc(**slices.find_slice(target).topology_arguments()).devices
placement = sharding.place(sharding.make_mesh(sharding.MeshConfig(devices=1), devices[:1]), {})
here = jax.NamedSharding(placement.mesh, jax.P())


def abstract(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here)


x = abstract(16, 97, 512, dtype=jnp.bfloat16)
if program == "attention":
    config = trm.TrmConfig(
        hidden_size=512, num_layers=2, H_cycles=1, L_cycles=1, mixing={"kind": "attention"},
        puzzle_embedding={"kind": "none"},
    )
    weights = jax.eval_shape(lambda key: trm.init(config, trm.PuzzleShape(97, 11, 1), key)["layers"], jax.random.key(0))
    given = (jax.tree.map(lambda array: abstract(*array.shape), weights), x, x)
    rope = layers.rope_tables(97, 64, 1e4)

    def work(weights, h, x):
        net = tpu_net.pack(weights, 97, h.dtype, rope)
        return tpu_net.apply(net, h, x, placement, epsilon=1e-5, num_heads=8)
elif program == "splash":
    given = (*(abstract(1, 4096, heads, 128, dtype=jnp.bfloat16) for heads in (8, 2, 2, 8)),)

    def work(q, k, v, dy):
        return jax.vjp(lambda *given: attention.causal(*given, placement), q, k, v)[1](dy)
else:
    size, inner = (97, 512) if program == "tokens" else (512, 1536)
    given = (abstract(size, 2, inner), abstract(inner, size), x, x)
    block = tpu_layers.token_block if program == "tokens" else tpu_layers.channel_block

    def work(gate_up, down, x, dy):
        return jax.vjp(lambda *given: block(*given, 1e-5, placement), gate_up, down, x)[1](dy)


jax.jit(work).trace(*given).lower().compile()
"""


class Loop(NamedTuple):
    depth: int
    bundles: int
    booked: float  # cycles of all matrix units


def main() -> None:
    print(f"TPU compiler {compiler_version()}\n")
    print("| TPU | part of a layer | cycles an example | share of the peak | in plans |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            (target, program): start(target, program, Path(folder) / f"{target}_{program}")
            for target in TARGETS
            for program in sorted({part.program for part in (*LAYER.values(), *SPLASH.values())})
        }
        for (target, program), job in jobs.items():
            if job.wait() != 0:
                sys.exit(f"compiling {program} for {target} failed:\n{job.stderr.read()[-2000:] if job.stderr else ''}")
        for target, kind in TARGETS.items():
            generation = target.partition("-")[0]
            parts = {name: (part, float(getattr(CHIPS[kind], name))) for name, part in LAYER.items()}
            known = calibration().splash_attention[generation]
            parts |= {f"splash, {name}": (part, getattr(known, name)) for name, part in SPLASH.items()}
            for name, (part, used) in parts.items():
                cycles = cycles_of(part, Path(folder) / f"{target}_{part.program}", PER_CYCLE[target])
                share = part.multiplications / PER_CYCLE[target] / cycles
                print(f"| {generation} | {name} | {cycles:,.0f} | {share:.2f} | {used:.2f} |")


def start(target: str, program: str, folder: Path) -> "subprocess.Popen[str]":
    dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
    environment = os.environ | ALONE | {"LIBTPU_INIT_ARGS": dump}
    command = [sys.executable, "-c", PROGRAM, json.dumps([target, program])]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def cycles_of(part: Part, folder: Path, per_cycle: int) -> float:
    """Of one example. The loops that multiply are known by their matrix units' bookings, and by their depth."""
    pattern = re.compile(rf"\d+-(transpose_)?(jvp_)?{part.kernel}(_*)\.[\w.]+-03-final_bundles\.txt")
    bundles = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    found = read(bundles[0])
    hot = [loop for loop in found if loop.booked > 0.01 * loop.bundles]
    if part.program in ("tokens", "splash"):  # one loop over examples, or over blocks
        return stretched(hot, part.multiplications / per_cycle)
    if part.program == "attention":  # the first that multiplies mixes positions, an example at a time
        return stretched(hot[:1], part.multiplications / per_cycle)
    # A loop over parts of the inner width inside one over groups of examples, whose size its bookings tell.
    around = max(loop.bundles for loop in found if loop.depth == hot[0].depth - 1)
    one_part = part.multiplications / per_cycle / PARTS
    booked = sum(loop.booked for loop in hot)
    group = 1 << round(math.log2(booked / one_part))
    return (PARTS * stretched(hot, group * one_part) + around) / group


def stretched(loops: list[Loop], needed: float) -> float:
    bundles, booked = sum(loop.bundles for loop in loops), sum(loop.booked for loop in loops)
    return bundles * max(1.0, needed / booked)


def read(path: Path) -> list[Loop]:
    """The loops of a schedule: each line of it is a bundle, with as many `>` as loops are around it."""
    bookings = path.with_name(path.name.replace("03-final_bundles", "01-final_hlo-static-per-bundle-utilization"))
    head, _, rows = bookings.read_text().partition("== UTILIZATION:\n")
    units = int(head.splitlines()[2].split()[0])
    booked = [int(row.split()[0]) / units for row in rows.splitlines()]
    lines = [
        line.partition("{")[0] for line in path.read_text().splitlines() if re.match(r"\s*0x[0-9a-f]+\s|\s*0\s", line)
    ]
    loops: list[Loop] = []
    stack: list[int] = []
    for line, matrix in zip(lines, booked, strict=True):
        depth = line.count(">")
        del stack[depth:]
        if " LB" in line and len(stack) == depth:
            stack.pop()
        while len(stack) < depth:
            stack.append(len(loops))
            loops.append(Loop(len(stack), 0, 0.0))
        if stack:
            at = loops[stack[-1]]
            loops[stack[-1]] = at._replace(bundles=at.bundles + 1, booked=at.booked + matrix)
    return loops


if __name__ == "__main__":
    main()
