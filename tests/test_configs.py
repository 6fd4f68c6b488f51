"""Every config that is shipped loads, and its step lowers to a program for one device and for eight."""

import math
import re
from pathlib import Path

import jax
import pytest

from fixtures import CONFIGS
from tinypod.config import load, read_tree
from tinypod.experiment import ExperimentConfig, build
from tinypod.tasks import KINDS

DOCS = CONFIGS.parents[2] / "docs"

SHIPPED = sorted(p for p in CONFIGS.rglob("*.yaml") if p.name != "base.yaml" and p.parent.name != "studies")


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_it_lowers(path: Path, devices: int, tmp_path: Path) -> None:
    config = load(path, [f"data.path={tmp_path / 'not_there'}"], ExperimentConfig)
    devices = math.gcd(devices, config.batch_size // config.accumulation)  # a recipe for one chip has few rows a part
    devices = max(devices, config.mesh.tensor)
    experiment = build(config, jax.devices()[:devices], planned=True)
    experiment.check_batch()
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes
        text = experiment.train_step.lower(*experiment.abstract_inputs).as_text()
    assert "f64" not in text
    assert "callback" not in text
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == len(
        jax.tree.leaves(experiment.abstract_state)
    )


@pytest.mark.parametrize("name", ["sudoku_mlp", "sudoku_attention"])
def test_the_paper_s_recipes_are_short_and_the_paper_s(name: str, tmp_path: Path) -> None:
    path = CONFIGS / "trm" / f"{name}.yaml"
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) < 15
    config = load(path, [], ExperimentConfig)
    assert (config.steps, config.batch_size, config.ema_decay) == (65104, 768, 0.999)
    model, optimizer = config.model, config.optimizer
    assert (model.hidden_size, model.num_layers, model.H_cycles, model.L_cycles, model.expansion) == (512, 2, 3, 6, 4.0)
    assert (optimizer.kind, optimizer.learning_rate, optimizer.weight_decay) == ("adam_atan2", 1e-4, 1.0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.schedule.warmup_steps) == (0.9, 0.95, 2000)
    assert (optimizer.tables.learning_rate, optimizer.tables.weight_decay) == (1e-4, 1.0)
    assert (config.task.halting.max_steps, config.task.halting.exploration) == (16, 0.1)
    assert config.data.augmentations == 1000


def test_base_alone_is_not_a_config() -> None:
    assert "steps" not in read_tree(CONFIGS / "base.yaml")


def test_the_docs_name_every_key() -> None:
    """Of the config and its sections; those that have sections of their own are named with a dot or in their row."""
    text = (DOCS / "configs.md").read_text()
    sections = [ExperimentConfig, *(part for kind in KINDS.values() for part in (kind.task, kind.data, kind.model))]
    named = {name for section in sections for name in section.model_fields} - {"kind", "schema_version"}
    assert {name for name in named if not re.search(rf"`(\w+)?\.?{name}[`.]", text)} == set()
