"""What saving costs the step loop: seconds that a save blocks it, and how much slower the steps beside it are.

    python benchmarks/saving.py demo data.path=data/demo

Trains in groups of steps, every second group with a save at its beginning, in turn, so that a busy machine slows both
kinds alike. What a save costs is the difference of the medians of the two kinds of group; its share of the loop is that
cost over the time of `checkpoint.every_steps` steps (1 000 by default). The share at which the loop only waits for
`save` to return is given beside it.
"""

import argparse
import datetime
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from tinypod import config as configs
from tinypod.experiment import ExperimentConfig, build
from tinypod.runs.checkpoints import Checkpoints
from tinypod.runs.saver import about


def measure(config: ExperimentConfig, folder: Path, groups: int, steps: int) -> dict[str, float]:
    experiment = build(config)
    feed, settings = experiment.task.open_feed(experiment.mesh), experiment.put_settings()
    state, number_0 = experiment.init(), experiment.put(np.int32(0))
    step = experiment.train_step.lower(*experiment.abstract_inputs).compile()
    origin = about(experiment)
    checkpoints = Checkpoints(folder, keep_last=config.checkpoint.keep_last)
    checkpoints.prepare(experiment.abstract_state)
    blocked: list[float] = []
    with_save: list[float] = []
    without: list[float] = []
    for number in range(2 * groups + 2):
        saving = number % 2 == 0
        began = time.perf_counter()
        if saving:
            checkpoints.save(state, origin)
            blocked.append(time.perf_counter() - began)
        for _ in range(steps):
            state, _ = step(state, settings, number_0, feed(0))
        jax.block_until_ready(state)
        (with_save if saving else without).append(time.perf_counter() - began)
        checkpoints.wait()
    checkpoints.close()
    # The first of each warms up: threads, caches.
    return {
        "step_s": statistics.median(without[1:]) / steps,
        "blocked_s": statistics.median(blocked[1:]),
        "cost_s": statistics.median(with_save[1:]) - statistics.median(without[1:]),
        "state_bytes": float(sum(x.nbytes for x in jax.tree.leaves(state))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="a.b=value")
    parser.add_argument("--groups", type=int, default=12, help="of each kind")
    parser.add_argument("--steps", type=int, default=10, help="in a group")
    arguments = parser.parse_args()
    config = configs.load(arguments.config, arguments.overrides, ExperimentConfig)
    every = config.checkpoint.every_steps or 1000
    with tempfile.TemporaryDirectory() as folder:
        found = measure(config, Path(folder) / "checkpoints", arguments.groups, arguments.steps)
    device = jax.devices()[0]
    loop_s = every * found["step_s"]
    print(f"{datetime.date.today()}, {len(jax.devices())} × {device.device_kind}, jax {jax.__version__}")
    print(f"{arguments.config.name}: batch {config.batch_size}, state {found['state_bytes'] / 1e6:.1f} MB")
    print("| step ms | save blocks ms | save costs ms | share of the loop, blocked | share of the loop, in all |")
    print("|---|---|---|---|---|")
    cells = [1000 * found[name] for name in ("step_s", "blocked_s", "cost_s")]
    shares = [found[name] / loop_s for name in ("blocked_s", "cost_s")]
    print(f"| {' | '.join(f'{cell:.1f}' for cell in cells)} | {' | '.join(f'{share:.3%}' for share in shares)} |")


if __name__ == "__main__":
    main()
