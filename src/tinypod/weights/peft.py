"""Adapters as PEFT has them, in and out, without torch: `adapter_config.json` and `adapter_model.safetensors`.

Of each layer they have `lora_A` [r, in] and `lora_B` [out, r]; ours are [*in, r] and [r, *out], stacked over the
layers. Written in float32, so that they come back to the bit. Which layers an adapter is for is taken from its tensors:
the `target_modules` of a config may be a pattern. A feature of PEFT that changes what an adapter computes, and is not
here, is refused by its name: keys that are not known may be there only if they are null, false or empty.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tinypod.errors import ConfigError, UserError
from tinypod.models.lora import Lora
from tinypod.models.qwen3 import LINEARS, Params, Qwen3Config
from tinypod.runs.storage import replace_file
from tinypod.weights import hugging_face

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B")
# Keys that say nothing of what an adapter computes, or that are compared with our config.
_IGNORED = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "layers_pattern",
    "lora_alpha",
    "lora_dropout",  # of training alone
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
# Other initialisations change the base model's weights, too.
_ALLOWED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, None, "gaussian")}


def write_adapter(folder: Path, config: Qwen3Config, params: Params, base: str | None) -> None:
    """`base` is where the weights lie that the adapter belongs to, if PEFT can read them there."""
    from safetensors.numpy import save_file

    if config.lora is None:
        raise UserError("the model has no adapters to write for PEFT: model.lora is not set in its config")
    tensors: dict[str, np.ndarray] = {}
    for name in config.lora.targets:
        leaf = params["layers"][LINEARS[name][0]][name]
        for part in _PARTS:
            for key, value in zip(_keys(name, part, config), np.asarray(leaf[part], np.float32), strict=True):
                rows = math.prod(value.shape[:-1]) if part == "lora_A" else value.shape[0]
                tensors[key] = np.ascontiguousarray(value.reshape(rows, -1).T)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    rank = config.lora.rank
    alpha = float(rank if config.lora.alpha is None else config.lora.alpha)
    theirs = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": [f"{name}_proj" for name in config.lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    replace_file(folder / CONFIG, (json.dumps(theirs, indent=2) + "\n").encode())


def read_adapter(folder: Path, config: Qwen3Config) -> dict[str, dict[str, np.ndarray]]:
    """By linear layer its `lora_A` and `lora_B`, in our shapes. They must be those that `model.lora` describes."""
    if config.lora is None:
        raise ConfigError("model.lora: not set; an adapter needs a config with it, e.g. 'model.lora={rank: 8}'")
    theirs = _read_config(folder / CONFIG)
    tensors = _read_tensors(folder)
    keys = {(name, part): _keys(name, part, config) for name in LINEARS for part in _PARTS}
    if unknown := sorted(set(tensors) - {key for some in keys.values() for key in some}):
        raise UserError(
            f"{folder / TENSORS}: {', '.join(unknown[:3])}{' and others' if len(unknown) > 3 else ''} cannot be used; "
            f"expected LoRA of the linear layers of {config.num_layers} layers"
        )
    targets = [name for name in LINEARS if any(key in tensors for part in _PARTS for key in keys[name, part])]
    _compare(folder, config.lora, theirs, targets)
    if missing := [key for (name, _), some in keys.items() if name in targets for key in some if key not in tensors]:
        raise UserError(f"{folder / TENSORS}: no {missing[0]}; expected an adapter of every layer")
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in targets:
        inputs, outputs = (config.sizes(letters) for letters in LINEARS[name][1:])
        shapes = {"lora_A": (*inputs, config.lora.rank), "lora_B": (config.lora.rank, *outputs)}
        found[name] = {}
        for part, shape in shapes.items():
            rows = math.prod(shape[:-1]) if part == "lora_A" else shape[0]
            expected = (math.prod(shape) // rows, rows)
            for key in keys[name, part]:
                if tensors[key].shape != expected:
                    raise UserError(f"{folder / TENSORS}: {key} is {tensors[key].shape}, expected {expected}")
            found[name][part] = np.stack([tensors[key].T.reshape(shape) for key in keys[name, part]])
    return found


def _keys(name: str, part: str, config: Qwen3Config) -> list[str]:
    """Their names for a part of ours, one a layer."""
    path = f"layers.{LINEARS[name][0]}.{name}.weight"
    whole = hugging_face.names(path, config.num_layers)
    return [f"{_PREFIX}{one.removesuffix('weight')}{part}.weight" for one in whole]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        theirs = json.loads(path.read_text())
        if not isinstance(theirs, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        raise UserError(f"{path.parent}: no {CONFIG}; expected the folder of a PEFT adapter") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    for key, value in theirs.items():
        if key in _ALLOWED:
            if value not in _ALLOWED[key]:
                known = " or ".join(json.dumps(one) for one in _ALLOWED[key])
                raise UserError(f"{path}: {key} is {value!r}, which cannot be used here; expected {known}")
        elif key not in _IGNORED and value:
            raise UserError(f"{path}: {key} is {value!r}; an adapter with it cannot be used here, only plain LoRA")
    if missing := [key for key in ("peft_type", "r", "lora_alpha") if key not in theirs]:
        raise UserError(f"{path}: no {', '.join(missing)}; expected the config of a LoRA adapter")
    return theirs


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    path = folder / TENSORS
    if not path.exists():
        raise UserError(
            f"{folder}: no {TENSORS}; an adapter in another form must be saved by PEFT as safetensors first"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            return {key: np.asarray(file.get_tensor(key)).astype(np.float32) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _compare(folder: Path, ours: Lora, theirs: dict[str, Any], targets: list[str]) -> None:
    alpha = float(ours.rank if ours.alpha is None else ours.alpha)
    pairs = {
        "rank": (ours.rank, theirs["r"]),
        "alpha": (alpha, float(theirs["lora_alpha"])),
        "targets": (sorted(ours.targets), sorted(targets)),
    }
    lines = [
        f"\n  model.lora.{key}: {here} here, {there} there" for key, (here, there) in pairs.items() if here != there
    ]
    if lines:
        raise ConfigError(f"{folder} is an adapter of another kind:{''.join(lines)}")
