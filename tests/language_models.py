"""Tiny language models that tests of weights share, and the same in `transformers`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from tinypod.models import qwen3
from tinypod.models.qwen3 import Qwen3Config
from tinypod.sharding import path_of
from tinypod.weights import hugging_face

SHAPE: dict[str, Any] = {
    "kind": "qwen3",
    "vocab_size": 264,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "mlp_size": 40,
    "dtype": "float32",
}


def make_model(**changes: Any) -> tuple[Qwen3Config, Any]:
    """Random weights, all of them: norms and adapters, too. Made by numpy, as JAX would compile for each shape."""
    config = Qwen3Config.model_validate(SHAPE | changes)
    random = np.random.default_rng(0)

    def make(key_path: Any, wanted: Any) -> jax.Array:
        path = path_of(key_path)
        if path.endswith(".index"):
            return jnp.asarray(random.integers(0, 2 ** config.bits(path.split(".")[2]), wanted.shape, np.uint8))
        centre, spread = (1.0, 0.3) if path.endswith(("norm", ".g")) else (0.0, 0.2)
        return jnp.asarray(centre + spread * random.standard_normal(wanted.shape), wanted.dtype)

    shapes = jax.eval_shape(lambda: qwen3.init(config, jax.random.key(0)))
    return config, jax.tree_util.tree_map_with_path(make, shapes)


def in_transformers(folder: Path, config: Qwen3Config, params: Any) -> Any:
    """A model with plain weights, by way of its Hugging Face folder."""
    hugging_face.write_params(folder, config, params, "float32")
    return transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()


def our_logits(config: Qwen3Config, params: Any, tokens: np.ndarray) -> np.ndarray:
    prepared = qwen3.prepare(config, params)
    return np.asarray(qwen3.head(config, prepared)(qwen3.apply(config, prepared, tokens)))


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()
