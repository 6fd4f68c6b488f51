"""A run's weights for other programs."""

from pathlib import Path
from typing import Any, Literal

from tinypod.errors import UserError
from tinypod.models.qwen3 import Qwen3Config
from tinypod.weights import authors, hugging_face, packed, peft
from tinypod.weights.convert import merge, without_adapters

Format = Literal["hugging_face", "peft", "packed"]
Dtype = Literal["float32", "bfloat16", "float16"]


def write_weights(
    out: Path,
    model: Any,
    params: Any,
    dtype: Dtype | None = None,
    format: Format | None = None,
    base: Path | None = None,
    origin: str = "",
) -> str:
    """A language model in one of the formats, a TRM as its authors' state dict; returns what there is to say of it.

    PEFT's adapters belong to a base: `origin` says where it came from; `base` is a folder to write it to.
    """
    if not isinstance(model, Qwen3Config):
        if format is not None or dtype is not None or base is not None:
            raise UserError(
                f"--format, --dtype and --base are for language models; a {model.kind} is written as its authors' "
                "PyTorch file: leave them out, or choose --format release"
            )
        authors.check_model(model)
        authors.write_state_dict(out, authors.to_state_dict(params))
        return ""
    if format == "packed":
        if dtype == "bfloat16":
            raise UserError("--dtype bfloat16: --format packed has factors in float16 or float32")
        return packed.write(out, model, params, dtype or "float16")
    if dtype == "float16":
        raise UserError("--dtype float16 is for --format packed; others have bfloat16 or float32")
    if format == "peft":
        return _write_adapter(out, model, params, dtype, base, origin)
    hugging_face.write_params(out, *merge(model, params), dtype or "bfloat16")
    return ""


def _write_adapter(
    out: Path, model: Qwen3Config, params: Any, dtype: Dtype | None, base: Path | None, origin: str
) -> str:
    if dtype is not None and base is None:
        raise UserError("--dtype: adapters are always float32; with --base FOLDER it is the dtype of their base")
    if base is None:
        peft.write_adapter(out, model, params, None if model.low_bit else origin or None)
    else:
        peft.write_adapter(out, model, params, str(base.absolute()))
        hugging_face.write_params(base, *merge(*without_adapters(model, params)), dtype or "bfloat16")
        return f"the weights that it belongs to are in {base}"
    if model.low_bit is not None:
        return "it belongs to low-bit weights, which PEFT cannot read: --base FOLDER writes them as floats"
    return f"it belongs to the weights of {origin}" if origin else ""
