"""Fused attention against the plain formula. The TPU's kernel runs in Pallas' interpreter; cuDNN's needs a GPU, and is
compared by `benchmarks/attention.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinypod import config as configs
from tinypod import sharding
from tinypod.experiment import ExperimentConfig, build
from tinypod.kernels import attention
from tinypod.sharding import ANYWHERE, MeshConfig


@pytest.mark.parametrize("mesh", [None, pytest.param(MeshConfig(data=2, fsdp=2, tensor=2), marks=pytest.mark.slow)])
def test_splash_attention_is_attention(mesh: MeshConfig | None) -> None:
    placement = ANYWHERE if mesh is None else sharding.place(sharding.make_mesh(mesh), {})
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, given = (
        jax.random.normal(key, (4, 256, heads, 128)) for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
    )

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.splash(q, k, v, placement, interpret=True)

    expected, pull_back = jax.vjp(plain, q, k, v)
    found, fused_pull_back = jax.vjp(jax.jit(fused), q, k, v)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    for ours, theirs in zip(fused_pull_back(given), pull_back(given), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_no_kernel_where_there_is_none() -> None:
    x = jnp.zeros((1, 128, 2, 128), jnp.bfloat16)
    assert attention.causal(x, x, x, ANYWHERE) is None
    assert attention.causal(x, x, x, sharding.place(sharding.make_mesh(MeshConfig()), {})) is None


@pytest.mark.parametrize(
    "mesh",
    [
        "{devices: 1}",
        "{devices: 8, data: 2, fsdp: 2, tensor: 2}",
        "{devices: 8, data: 2, pipeline: 2, fsdp: 2}",
    ],
)
def test_a_step_with_the_kernel_lowers_for_a_tpu(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is around the kernel must leave nothing of it to the partitioner; lowering says so, and needs no TPU."""
    monkeypatch.setattr(sharding.Placement, "kernels", "tpu")
    shape = ("hidden_size=16", "num_layers=2", "num_heads=4", "head_dim=128", "mlp_size=16")
    overrides = ("data.path=nowhere", "data.expected.length=128", f"mesh={mesh}", "accumulation=4", "batch_size=64")
    config = configs.load(
        "distill/tiny", [*overrides, *(f"model.{one}" for one in shape), "model.remat=true"], ExperimentConfig
    )
    experiment = build(config, planned=True)
    lowered = experiment.train_step.trace(*experiment.abstract_inputs).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()
