"""A run's weights for other programs."""

from pathlib import Path
from typing import Any

from tinypod.models.qwen3 import Qwen3Config
from tinypod.weights import authors, hugging_face
from tinypod.weights.convert import merge


def write_weights(out: Path, model: Any, params: Any, dtype: str) -> None:
    """A Hugging Face folder for a language model, the TRM authors' state dict for a TRM."""
    if isinstance(model, Qwen3Config):
        hugging_face.write_params(out, *merge(model, params), dtype)
    else:
        authors.write_state_dict(out, authors.to_state_dict(params))
