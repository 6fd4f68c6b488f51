"""Tiny language models that tests of weights share, and the same in `transformers`."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers

from tinypod.models import qwen3
from tinypod.models.qwen3 import LINEARS, Qwen3Config
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
    """Random weights; adapters, where there are any, that change something."""
    config = Qwen3Config.model_validate(SHAPE | changes)
    params = qwen3.init(config, jax.random.key(0))
    for key, (name, (group, *_)) in zip(jax.random.split(jax.random.key(1), 7), LINEARS.items(), strict=True):
        leaf = params["layers"][group][name]
        if "lora_B" in leaf:
            leaf["lora_A"] = 0.3 * jax.random.normal(key, leaf["lora_A"].shape)
            leaf["lora_B"] = 0.3 * jax.random.normal(jax.random.fold_in(key, 1), leaf["lora_B"].shape)
    return config, params


def in_transformers(folder: Path, config: Qwen3Config, params: Any) -> Any:
    """A model with plain weights, by way of its Hugging Face folder."""
    hugging_face.write_params(folder, config, params, "float32")
    return transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()


def our_logits(config: Qwen3Config, params: Any, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(qwen3.head(config, params)(qwen3.apply(config, params, tokens)))


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()
