"""Qwen3's weights from one form into another: plain to low-bit, more bits to fewer, adapters kept, merged or begun.

What is the same in both is taken over as it is. A plain weight that becomes low-bit is quantised anew; so is one whose
bits or ranks change, from its effective weight. An adapter that the target does not have is merged: added to a plain
weight; into a low-bit one by choosing its indices again under the scales that it has. A straight-through weight begins
as the source's effective weight; one that becomes frozen keeps the indices that it had, and its effective weight. Plain
weights may be rounded, as a baseline.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tinypod.errors import ConfigError
from tinypod.models import lora, low_bit, qwen3
from tinypod.models.qwen3 import LINEARS, Params, Qwen3Config
from tinypod.weights.rounding import Rounding, round_weight

SHAPE = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "tied")


class Converted(NamedTuple):
    params: Params
    errors: dict[str, float]  # by linear layer, relative, the mean over the layers; of those that were changed


def convert(
    source: Qwen3Config, params: Params, target: Qwen3Config, seed: int = 0, rounding: Rounding | None = None
) -> Converted:
    """The source's weights in the target's form; both must be of one shape."""
    if rounding is not None and target.low_bit is not None:
        raise ConfigError(f"--round {rounding.kind} makes plain weights: set model.low_bit=null")
    if different := [name for name in SHAPE if getattr(source, name) != getattr(target, name)]:
        lines = "".join(f"\n  model.{n}: {getattr(target, n)} here, {getattr(source, n)} there" for n in different)
        raise ConfigError(f"the weights are of another shape:{lines}")
    keys = dict(zip(LINEARS, jax.random.split(jax.random.key(seed), len(LINEARS)), strict=True))
    errors: dict[str, float] = {}
    groups: dict[str, Params] = {"attention": {}, "mlp": {}}
    for group, made in groups.items():
        for name, leaf in params["layers"][group].items():
            if name in LINEARS:
                made[name], error = _convert_linear(source, target, name, leaf, keys[name], rounding)
                errors |= {} if error is None else {name: error}
            else:
                made[name] = leaf
    plain = {name: x.astype(target.weight_dtype) for name, x in params.items() if name in ("embed", "head")}
    return Converted(params | plain | {"layers": params["layers"] | groups}, errors)


def _convert_linear(
    source: Qwen3Config, target: Qwen3Config, name: str, leaf: dict[str, Any], key: Any, rounding: Rounding | None
) -> tuple[dict[str, Any], float | None]:
    adapter = {part: x for part, x in leaf.items() if part.startswith("lora_")}
    base = {part: x for part, x in leaf.items() if part not in adapter}
    keeps = target.lora is not None and name in target.lora.targets
    merges = bool(adapter) and not (keeps and source.lora == target.lora)
    if merges and keeps:
        raise ConfigError(
            "model.lora: the weights have adapters of another kind; merge those first, into a run without"
        )
    made, error = _convert_base(source, target, name, base, adapter if merges else {}, rounding)
    if keeps:
        assert target.lora is not None
        sizes = [target.sizes(letters) for letters in LINEARS[name][1:]]
        made |= adapter or lora.init(key, target.num_layers, sizes[0], sizes[1], target.lora.rank)
    return made, error


def _convert_base(
    source: Qwen3Config,
    target: Qwen3Config,
    name: str,
    base: dict[str, Any],
    merged: dict[str, Any],
    rounding: Rounding | None,
) -> tuple[dict[str, Any], float | None]:
    inputs, low = len(LINEARS[name][1]), target.quantisation
    same_form = low is not None and low_bit.is_low_bit(base)
    same_form = same_form and (source.bits(name), source.rank(name)) == (target.bits(name), target.rank(name))
    same_leaf = same_form and source.straight_through == target.straight_through
    if (same_leaf or (low is None and not low_bit.is_low_bit(base))) and not merged and rounding is None:
        return {part: x.astype(target.weight_dtype) if part == "weight" else x for part, x in base.items()}, None

    def weight(one: dict[str, Any], adapter: dict[str, Any]) -> Any:
        w = qwen3.weight_of(source, name, one).astype(jnp.float32)
        assert not adapter or source.lora is not None
        return w + lora.delta(adapter, source.lora.scale) if adapter and source.lora else w

    def one_layer(parts: tuple[dict[str, Any], dict[str, Any]]) -> tuple[dict[str, Any], Any]:
        one, adapter = parts
        w = weight(one, adapter)
        if low is None:
            plain = w if rounding is None else round_weight(w, inputs, rounding)
            stored = plain.astype(target.weight_dtype)
            return {"weight": stored}, jnp.linalg.norm(w - stored.astype(jnp.float32)) / jnp.linalg.norm(w)
        bits = target.bits(name)
        if same_form:
            made = low_bit.tighten(one, w, bits)
        else:
            options = {"rank": target.rank(name), "group_size": low.group_size, "rounds": low.fit_rounds}
            made = low_bit.quantise(w, inputs=inputs, bits=bits, **options)
        made = low_bit.straight_through(made, w) if target.straight_through else made
        return made, low_bit.relative_error(w, made, bits)

    made, errors = jax.jit(lambda parts: jax.lax.map(one_layer, parts))((base, merged))
    return made, None if low is None and rounding is None else float(jnp.mean(errors))


def merge(config: Qwen3Config, params: Params) -> tuple[Qwen3Config, Params]:
    """Plain float weights, whatever the model is made of: what other programs can read."""
    forms = {"lora": None, "low_bit": None, "straight_through": False, "weight_dtype": "float32"}
    plain = config.model_copy(update=forms)
    return plain, convert(config, params, plain).params


def without_adapters(config: Qwen3Config, params: Params) -> tuple[Qwen3Config, Params]:
    """The base that the adapters belong to."""

    def bare(leaf: Any) -> Any:
        return {part: x for part, x in leaf.items() if not part.startswith("lora_")} if isinstance(leaf, dict) else leaf

    layers = params["layers"]
    groups = {group: {name: bare(leaf) for name, leaf in layers[group].items()} for group in ("attention", "mlp")}
    return config.model_copy(update={"lora": None}), params | {"layers": layers | groups}


def with_adapters(params: Params, adapters: dict[str, dict[str, Any]]) -> Params:
    """Other adapters in the place of those that there are, by linear layer."""
    layers = params["layers"]
    groups = {
        group: {name: leaf | adapters[name] if name in adapters else leaf for name, leaf in layers[group].items()}
        for group in ("attention", "mlp")
    }
    return params | {"layers": layers | groups}


def snap_magnitudes(params: Params) -> tuple[Params, float]:
    """Every g of the low-bit weights as float16 can hold it, and the largest relative change of one."""
    largest = 0.0
    groups: dict[str, Params] = {}
    for group in ("attention", "mlp"):
        groups[group] = dict(params["layers"][group])
        for name, leaf in groups[group].items():
            if low_bit.is_low_bit(leaf):
                snapped = low_bit.snap(leaf["g"])
                changes = jnp.abs(snapped - leaf["g"]) / jnp.where(leaf["g"] == 0, 1.0, jnp.abs(leaf["g"]))
                largest = max(largest, float(jnp.max(changes)))
                groups[group][name] = leaf | {"g": snapped}
    return params | {"layers": params["layers"] | groups}, largest
