"""Dense Qwen3 (arXiv 2505.09388) as functions over a nested dict. Any of its linear layers may be low-bit, or carry
LoRA.

    embed [V, D]                             tokens; also the head where it is tied
    layers.attention.{q,k,v,o}, layers.mlp.{gate,up,down}   linear leaves, stacked over the layers
    layers.attention.{q_norm,k_norm} [n, H], layers.{attention_norm,mlp_norm} [n, D], norm [D]
    head [D, V]                              absent where it is tied

A linear leaf is a dict: `weight` [n, *in, *out], or what `low_bit` says, and perhaps what `lora` says. `prepare` makes
effective weights of low-bit ones, `lower` puts them into the dtype that they are multiplied in; all that computes is
given prepared parameters.

With a `pipeline` axis each device has the layers of its stage. The parts of a batch go from stage to stage, each stage
working on another part at a time: after `parts + stages - 1` turns all have passed.

Shape letters: B batch, T positions, D width, N query heads, K key and value heads, H width of a head, F inner width of
an MLP, V vocabulary, n layers, M parts of a batch.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from pydantic import PositiveFloat, PositiveInt, model_validator

from tinypod.config import Config
from tinypod.kernels import attention
from tinypod.models import layers, lora, low_bit
from tinypod.models.lora import Lora
from tinypod.models.low_bit import LowBit, Preset
from tinypod.sharding import ANYWHERE, Placement, Rules, constrain

Params = dict[str, Any]

# Each linear layer: its group, and the letters of its inputs and outputs.
LINEARS: dict[str, tuple[str, str, str]] = {
    "q": ("attention", "D", "NH"),
    "k": ("attention", "D", "KH"),
    "v": ("attention", "D", "KH"),
    "o": ("attention", "NH", "D"),
    "gate": ("mlp", "D", "F"),
    "up": ("mlp", "D", "F"),
    "down": ("mlp", "F", "D"),
}
KEPT = "kept for the backward pass"  # what is not recomputed there, by name
_AXES = {"D": "fsdp", "N": "tensor", "K": "tensor", "F": "tensor", "H": None}  # that split a dimension


class Qwen3Config(Config):
    kind: Literal["qwen3"] = "qwen3"
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    mlp_size: PositiveInt
    rope_theta: PositiveFloat = 1e6
    norm_eps: PositiveFloat = 1e-6
    tied: bool = True  # the head is the embedding
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of the forward pass
    weight_dtype: Literal["float32", "bfloat16"] = "float32"  # of plain weights; bfloat16 only where they are frozen
    remat: bool = False  # recompute all of a layer in the backward pass; false: all but its products and attention
    unroll: bool = False  # layers one after the other instead of a loop: longer to compile, nothing copied in and out
    low_bit: Preset | LowBit | None = None
    straight_through: bool = False  # train low-bit weights too, not their scales alone: the indices follow them
    lora: Lora | None = None

    @model_validator(mode="after")
    def _shapes_fit(self) -> "Qwen3Config":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for RoPE")
        if self.straight_through and self.low_bit is None:
            raise ValueError("straight_through=true is for low-bit weights: set low_bit, or straight_through=false")
        if self.straight_through and self.lora is not None:
            raise ValueError(
                "straight_through=true trains the weights, lora freezes them: set one of them to null/false"
            )
        return self

    @property
    def quantisation(self) -> LowBit | None:
        return low_bit.PRESETS[self.low_bit] if isinstance(self.low_bit, str) else self.low_bit

    def sizes(self, letters: str) -> tuple[int, ...]:
        known = {"D": self.hidden_size, "N": self.num_heads, "K": self.num_kv_heads, "H": self.head_dim}
        return tuple((known | {"F": self.mlp_size})[letter] for letter in letters)

    def bits(self, name: str) -> int:
        assert self.quantisation is not None
        return self.quantisation.mlp_bits if LINEARS[name][0] == "mlp" else self.quantisation.attention_bits

    def rank(self, name: str) -> int:
        assert self.quantisation is not None
        return self.quantisation.mlp_rank if LINEARS[name][0] == "mlp" else self.quantisation.attention_rank


def init(config: Qwen3Config, key: Array) -> Params:
    D, H, n = config.hidden_size, config.head_dim, config.num_layers
    keys = dict(zip(("embed", "head", *LINEARS), jax.random.split(key, 2 + len(LINEARS)), strict=True))
    stacked: Params = {
        "attention": {"q_norm": jnp.ones((n, H)), "k_norm": jnp.ones((n, H))},
        "attention_norm": jnp.ones((n, D)),
        "mlp": {},
        "mlp_norm": jnp.ones((n, D)),
    }
    for name, (group, *_) in LINEARS.items():
        stacked[group][name] = init_linear(config, name, keys[name])
    params: Params = {
        "embed": layers.truncated_normal(keys["embed"], (config.vocab_size, D), 0.02).astype(config.weight_dtype),
        "layers": stacked,
        "norm": jnp.ones(D),
    }
    if not config.tied:
        head = layers.truncated_normal(keys["head"], (D, config.vocab_size), 0.02)
        params["head"] = head.astype(config.weight_dtype)
    return params


def init_linear(config: Qwen3Config, name: str, key: Array) -> dict[str, Array]:
    inputs, outputs = (config.sizes(letters) for letters in LINEARS[name][1:])
    weight_key, lora_key = jax.random.split(key)
    leaf: dict[str, Array] = {}
    if config.quantisation is not None:
        leaf |= low_bit.init(weight_key, config.num_layers, inputs, outputs, config.bits(name), config.rank(name))
        if config.straight_through:
            latent = jax.lax.map(lambda one: low_bit.effective(one, config.bits(name)), leaf)
            leaf = low_bit.straight_through(leaf, latent)
    else:
        std = 1 / math.sqrt(math.prod(inputs))
        weight = layers.truncated_normal(weight_key, (config.num_layers, *inputs, *outputs), std)
        leaf["weight"] = weight.astype(config.weight_dtype)
    if config.lora is not None and name in config.lora.targets:
        leaf |= lora.init(lora_key, config.num_layers, inputs, outputs, config.lora.rank)
    return leaf


def sharding_rules(config: Qwen3Config, prepared: bool = False) -> Rules:
    rules: list[tuple[str, PartitionSpec]] = [
        # Not split over the vocabulary: XLA's partitioner aborts on look-ups in it beside a `data` axis taken apart.
        (r"embed", PartitionSpec(None, "fsdp")),
        (r"layers\..*_norm", PartitionSpec("pipeline")),
        (r"norm", PartitionSpec()),
    ]
    if not config.tied:
        rules.append((r"head", PartitionSpec("fsdp")))
    for name, (group, inputs, outputs) in LINEARS.items():
        into, out = ([_AXES[letter] for letter in letters] for letters in (inputs, outputs))
        leaf = rf"layers\.{group}\.{name}\."
        if config.quantisation is None or prepared:
            rules.append((leaf + "weight", PartitionSpec("pipeline", *into, *out)))
        else:
            indices = "latent" if config.straight_through else "index"
            rules += [
                (leaf + indices, PartitionSpec("pipeline", *into, *out)),
                (leaf + "A", PartitionSpec("pipeline", *out)),
                (leaf + "B", PartitionSpec("pipeline", None, *into)),
                (leaf + "g", PartitionSpec("pipeline")),
            ]
        if config.lora is not None and name in config.lora.targets:
            rules += [
                (leaf + "lora_A", PartitionSpec("pipeline", *into)),
                (leaf + "lora_B", PartitionSpec("pipeline", None, *out)),
            ]
    return rules


def prepare(config: Qwen3Config, params: Params, dtype: str | None = None) -> Params:
    """Each low-bit weight as its effective one, in the dtype asked for; everything else as it is."""
    if config.quantisation is None:
        return params
    # Factors that are trained get their gradients through it, which add up over the parts of a batch in float32.
    dtype = dtype or (config.dtype if config.lora is not None else "float32")

    def one(name: str, leaf: dict[str, Array]) -> dict[str, Array]:
        weight = jax.vmap(lambda layer: weight_of(config, name, layer))(leaf).astype(dtype)
        return {"weight": weight} | {part: x for part, x in leaf.items() if part.startswith("lora_")}

    return _map_linears(params, one)


def lower(config: Qwen3Config, prepared: Params) -> Params:
    """Weights of linear layers in the dtype of the forward pass: once a step, not once for each part and pass. With
    FSDP, half is gathered."""
    return _map_linears(prepared, lambda _, leaf: leaf | {"weight": leaf["weight"].astype(config.dtype)})


def _map_linears(params: Params, change: Callable[[str, dict[str, Array]], dict[str, Array]]) -> Params:
    stacked = params["layers"]
    groups = {
        group: {name: change(name, leaf) if name in LINEARS else leaf for name, leaf in stacked[group].items()}
        for group in ("attention", "mlp")
    }
    return params | {"layers": stacked | groups}


def weight_of(config: Qwen3Config, name: str, leaf: dict[str, Array]) -> Array:
    """The effective weight of one layer, without its adapter: [*in, *out]."""
    return low_bit.effective(leaf, config.bits(name)) if low_bit.is_low_bit(leaf) else leaf["weight"]


def linear(config: Qwen3Config, name: str, leaf: dict[str, Array], x: Array) -> Array:
    """x [..., *in] -> [..., *out]; the leaf of one layer, prepared."""
    y = jnp.tensordot(x, leaf["weight"].astype(x.dtype), axes=len(LINEARS[name][1]))
    if "lora_A" in leaf:
        assert config.lora is not None
        y = y + lora.apply(leaf, x, config.lora.scale)
    return checkpoint_name(y, KEPT)


Rope = tuple[Array, Array]
Project = Callable[[Qwen3Config, str, dict[str, Array], Array], Array]  # as `linear`: how a linear layer is applied


def before_attention(
    config: Qwen3Config, layer: Params, x_BTD: Array, rope: Rope, project: Project = linear
) -> tuple[Array, Array, Array]:
    """The first part of a layer: queries [B, T, N, H], keys and values [B, T, K, H], with their positions."""
    part = layer["attention"]
    h_BTD = layers.scaled_rms_norm(x_BTD, layer["attention_norm"], config.norm_eps)
    q_BTNH, k_BTKH, v_BTKH = (project(config, name, part[name], h_BTD) for name in "qkv")
    q_BTNH = layers.rotate(layers.scaled_rms_norm(q_BTNH, part["q_norm"], config.norm_eps), *rope)
    k_BTKH = layers.rotate(layers.scaled_rms_norm(k_BTKH, part["k_norm"], config.norm_eps), *rope)
    return q_BTNH, k_BTKH, v_BTKH


def after_attention(
    config: Qwen3Config, layer: Params, x_BTD: Array, y_BTNH: Array, project: Project = linear
) -> Array:
    """The rest of it: `y` is what attention made of the values."""
    x_BTD = x_BTD + project(config, "o", layer["attention"]["o"], y_BTNH)
    h_BTD = layers.scaled_rms_norm(x_BTD, layer["mlp_norm"], config.norm_eps)
    gate_BTF, up_BTF = (project(config, name, layer["mlp"][name], h_BTD) for name in ("gate", "up"))
    return x_BTD + project(config, "down", layer["mlp"]["down"], jax.nn.silu(gate_BTF) * up_BTF)


def make_block(config: Qwen3Config, num_positions: int, placement: Placement) -> Callable[[Array, Params], Array]:
    """One layer of the stack."""
    rope = layers.rope_tables(num_positions, config.head_dim, config.rope_theta)

    def block(x_BTD: Array, layer: Params) -> Array:
        if placement.gather is not None:
            layer = placement.gather("layers", layer)
        y_BTNH = layers.causal_attention(*before_attention(config, layer, x_BTD, rope), placement)
        return after_attention(config, layer, x_BTD, y_BTNH)

    # Without a policy of its own, autodiff would keep float32 copies of all that norms, positions and gates put out:
    # several times the memory, and more time than they take to compute.
    return jax.checkpoint(block, policy=None if config.remat else _is_kept)


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name in attention.KEPT_PRIMITIVES or (primitive.name == "name" and params["name"] == KEPT)


def apply(config: Qwen3Config, params: Params, tokens_BT: Array, placement: Placement = ANYWHERE) -> Array:
    """The last hidden states [B, T, D], normalised: what the head takes."""
    x_BTD = look_up(config, params, tokens_BT, placement)
    x_BTD = _run_layers(config, params["layers"], placement)(x_BTD)
    return layers.scaled_rms_norm(x_BTD, params["norm"], config.norm_eps)


def look_up(config: Qwen3Config, params: Params, tokens: Array, placement: Placement) -> Array:
    embed_VD = params["embed"] if placement.gather is None else placement.gather("embed", params["embed"])
    return embed_VD[tokens].astype(config.dtype)


def _run_layers(config: Qwen3Config, stacked: Params, placement: Placement) -> Callable[[Array], Array]:
    """All the layers of a stack, one after the other."""

    def run(x_BTD: Array) -> Array:
        block = make_block(config, x_BTD.shape[1], placement)
        if not config.unroll:
            return jax.lax.scan(lambda x, layer: (block(x, layer), None), x_BTD, stacked)[0]
        for layer in unstack(stacked):
            x_BTD = block(x_BTD, layer)
        return x_BTD

    return run


def unstack(stacked: Params) -> list[Params]:
    """Layer by layer. By splitting, whose gradient is a concatenation: indexing's would be a sum of padded arrays."""
    leaves, tree = jax.tree.flatten(stacked)
    layers = zip(*([part[0] for part in jnp.split(leaf, len(leaf))] for leaf in leaves), strict=True)
    return [jax.tree.unflatten(tree, layer) for layer in layers]


def num_stages(config: Qwen3Config, params: Params) -> int:
    """More than one where the `pipeline` axis is taken apart, and these are the layers of one stage."""
    return config.num_layers // len(params["layers"]["mlp_norm"])


def apply_in_stages(config: Qwen3Config, params: Params, tokens_MBT: Array, placement: Placement = ANYWHERE) -> Array:
    """The same for parts of a batch that pass the stages: of those parts that are this stage's, [M / stages, B, T, D].

    What leaves the last stage is dealt out over all of them, so that each computes the head of its share.
    """
    parts, stages, stage = len(tokens_MBT), num_stages(config, params), jax.lax.axis_index("pipeline")
    run = _run_layers(config, params["layers"], placement)
    x_MBTD = look_up(config, params, tokens_MBT, placement)
    following = [(i, i + 1) for i in range(stages - 1)]

    def turn(handed_BTD: Array, number: Array) -> tuple[Array, Array]:
        # The first stage begins a part each turn, the others take what the one before them has left.
        begun_BTD = jax.lax.dynamic_index_in_dim(x_MBTD, jnp.minimum(number, parts - 1), keepdims=False)
        x_BTD = run(constrain(jnp.where(stage == 0, begun_BTD, handed_BTD), PartitionSpec("fsdp")))
        return jax.lax.ppermute(x_BTD, "pipeline", following), x_BTD

    nothing = jnp.zeros_like(x_MBTD[0])
    left_BTD = jax.lax.scan(turn, nothing, jnp.arange(parts + stages - 1))[1][stages - 1 :]
    whole_MBTD = jnp.where(stage == stages - 1, left_BTD, 0)
    mine = jax.lax.psum_scatter(whole_MBTD, "pipeline", scatter_dimension=0, tiled=True)
    return layers.scaled_rms_norm(mine, params["norm"], config.norm_eps)


def head_weight(config: Qwen3Config, params: Params, placement: Placement = ANYWHERE) -> Array:
    """[D, V], made whole."""
    name = "embed" if config.tied else "head"
    weight = params[name] if placement.gather is None else placement.gather(name, params[name])
    return (weight.T if config.tied else weight).astype(config.dtype)


def head(config: Qwen3Config, params: Params, placement: Placement = ANYWHERE) -> Callable[[Array], Array]:
    """hidden [..., D] -> float32 logits [..., V]; the weights are made whole once."""
    weight = head_weight(config, params, placement)
    return lambda hidden: jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)


def bits_per_weight(config: Qwen3Config, *names: str) -> float:
    """Of the linear layers named, or of all: low-bit ones with scales in float16, plain ones as they are stored."""
    total = count = 0.0
    for name in names or LINEARS:
        inputs, outputs = (math.prod(config.sizes(letters)) for letters in LINEARS[name][1:])
        bits = float(jnp.dtype(config.weight_dtype).itemsize * 8)
        if config.quantisation is not None:
            bits = low_bit.bits_per_weight(inputs, outputs, config.bits(name), config.rank(name))
        total, count = total + bits * inputs * outputs, count + inputs * outputs
    return total / count


def count_matmul_flops(config: Qwen3Config, length: int, *, training: bool, trains_weights: bool = True) -> int:
    """Of one sequence: matrix products, nothing recomputed. Frozen weights need no gradient of their own, so that their
    backward pass costs one product instead of two."""
    linears = sum(math.prod(config.sizes(LINEARS[name][1] + LINEARS[name][2])) for name in LINEARS)
    scores = config.num_heads * config.head_dim * length  # q·k, and the same for the values; half is masked
    head = config.hidden_size * config.vocab_size
    times = (3 if trains_weights else 2) if training else 1
    products = times * (config.num_layers * linears + head) + (3 if training else 1) * config.num_layers * scores
    return 2 * length * products
