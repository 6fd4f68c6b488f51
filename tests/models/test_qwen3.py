"""Our Qwen3 against the implementation in `transformers`, on random weights."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from tinypod import sharding
from tinypod.models import qwen3
from tinypod.models.qwen3 import Qwen3Config
from tinypod.runs.checksums import flatten
from tinypod.weights import hugging_face

SHAPES: dict[str, dict[str, Any]] = {
    "two heads a key, tied": dict(num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=32, tied=True),
    "a key for each head, untied": dict(num_heads=3, num_kv_heads=3, head_dim=6, hidden_size=24, tied=False),
    "one key, odd theta": dict(
        num_heads=8, num_kv_heads=1, head_dim=16, hidden_size=40, tied=False, rope_theta=54321.5
    ),
}


def make_config(**changes: Any) -> Qwen3Config:
    usual: dict[str, Any] = dict(vocab_size=97, num_layers=3, mlp_size=56, dtype="float32")
    return Qwen3Config.model_validate(usual | SHAPES["two heads a key, tied"] | changes)


def theirs(folder: Path, config: Qwen3Config) -> Any:
    """A model of `transformers` with random weights, all of them (norms, too), written as it writes them."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied,
            rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.2) + ("norm" in name))
    model.save_pretrained(folder)
    return model


def read(folder: Path, config: Qwen3Config, mesh: Any = None) -> Any:
    shapes = jax.eval_shape(lambda: qwen3.init(config, jax.random.key(0)))
    mesh = mesh or sharding.make_mesh(sharding.MeshConfig(data=1), jax.devices()[:1])
    specs = sharding.param_specs(qwen3.sharding_rules(config), shapes, mesh)
    return hugging_face.read_params(folder, config, shapes, sharding.named(mesh, specs))


def logits_of(config: Qwen3Config, params: Any, tokens: np.ndarray) -> np.ndarray:
    hidden = qwen3.apply(config, params, jnp.asarray(tokens))
    return np.asarray(qwen3.head(config, params)(hidden))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    config = make_config(**SHAPES[name])
    model = theirs(tmp_path, config)
    assert hugging_face.read_model_config(tmp_path, dtype="float32") == config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 19))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    ours = logits_of(config, read(tmp_path, config), tokens)
    assert np.abs(ours - expected).max() / np.abs(expected).max() <= 1e-5


@pytest.mark.slow
def test_gradients_are_the_same_however_layers_are_run_and_only_remat_multiplies_again() -> None:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 16)))
    params = qwen3.init(make_config(hidden_size=128, mlp_size=384), jax.random.key(0))

    def compile_gradient(**changes: bool) -> Any:
        config = make_config(hidden_size=128, mlp_size=384, **changes)

        def loss(params: Any) -> jax.Array:
            return jnp.mean(jnp.square(qwen3.apply(config, params, tokens)))

        return jax.jit(jax.grad(loss)).lower(params).compile()

    looped, kept, again = (
        compile_gradient(**changes) for changes in ({}, {"unroll": True}, {"unroll": True, "remat": True})
    )
    expected = flatten(looped(params))
    for program in (kept, again):
        for name, one in flatten(program(params)).items():
            np.testing.assert_allclose(one, expected[name], rtol=1e-4, atol=1e-7, err_msg=name)
    work = again.cost_analysis()["flops"] / kept.cost_analysis()["flops"]
    # Nearly all is in the three products of the MLP: one forward and two backward each, and two of them again: what
    # `down` put out no gradient asks for.
    assert work == pytest.approx(11 / 9, abs=0.05)


def test_a_folder_is_read_by_shards_and_written_again(tmp_path: Path) -> None:
    config = make_config(num_layers=2, hidden_size=32, mlp_size=64, vocab_size=96, tied=False)
    theirs(tmp_path / "in", config)
    whole = read(tmp_path / "in", config)
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
    split = read(tmp_path / "in", config, mesh)
    for path, leaf in flatten(split).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(flatten(whole)[path]), err_msg=path)
    assert split["layers"]["mlp"]["gate"]["weight"].sharding.shard_shape((2, 32, 64)) == (2, 16, 32)
    hugging_face.write_params(tmp_path / "out", config, whole, "float32")
    again = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = np.arange(20).reshape(2, 10)
    with torch.no_grad():
        expected = again(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(config, whole, tokens), expected, rtol=1e-4, atol=1e-5)
