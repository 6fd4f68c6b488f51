"""The Tiny Recursive Model (arXiv 2510.04871): one small network applied again and again to an answer z_H and a scratch
state z_L. Only the last of the H cycles carries gradients.

The paper's ablations are config: `single_z`, `separate_nets`, `one_step_gradient`.

Parameters are a dict; the top-level keys are groups that the optimizer treats differently:
    embed, layers, head, q_head   trained; each leaf of `layers` is stacked over the layers
    layers_L, layers_H            with separate nets, in place of `layers`
    z_init                        the fixed vectors that z starts from, never trained
    puzzle_table                  one row per puzzle identifier, updated by rows (absent without puzzle embeddings)

Shape letters: B batch, S tokens, P puzzle positions, T = P + S, D width, V vocabulary, E width of a puzzle row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tinypod.config import Config
from tinypod.kernels import tpu_net
from tinypod.models import layers
from tinypod.optim import Matrices, Matrix
from tinypod.sharding import ANYWHERE, Placement, Rules

Params = dict[str, Any]


class Rope(Config):
    kind: Literal["rope"] = "rope"
    theta: PositiveFloat = 10_000.0


class Learned(Config):
    kind: Literal["learned"] = "learned"


class NoPositions(Config):
    kind: Literal["none"] = "none"


class MlpMixing(Config):
    """The gated MLP over the token axis. There are no heads to rotate, so no RoPE."""

    kind: Literal["mlp"] = "mlp"
    positions: Annotated[Learned | NoPositions, Field(discriminator="kind")] = NoPositions()


class AttentionMixing(Config):
    kind: Literal["attention"] = "attention"
    num_heads: PositiveInt = 8
    positions: Annotated[Rope | Learned | NoPositions, Field(discriminator="kind")] = Rope()


class PuzzleTable(Config):
    kind: Literal["table"] = "table"
    width: PositiveInt = 512
    length: PositiveInt = 16


class NoPuzzleTable(Config):
    kind: Literal["none"] = "none"


class TrmConfig(Config):
    kind: Literal["trm"] = "trm"
    hidden_size: PositiveInt
    num_layers: PositiveInt
    H_cycles: PositiveInt
    L_cycles: PositiveInt
    expansion: PositiveFloat = 4.0
    mlp_multiple_of: PositiveInt = 256  # inner widths are rounded up to this
    gate: layers.Gate = "swiglu"  # of the MLPs, over channels and over tokens
    mixing: Annotated[MlpMixing | AttentionMixing, Field(discriminator="kind")]
    puzzle_embedding: Annotated[PuzzleTable | NoPuzzleTable, Field(discriminator="kind")]
    single_z: bool = False  # one state that is answer and scratch at once
    separate_nets: bool = False  # one network for z_L and one for z_H, as in HRM
    one_step_gradient: bool = False  # only through the last update of z_L and of z_H, as in HRM
    stop_bias: float = -5.0  # of the halting logits at first; a short run hardly moves it
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of the forward pass; weights are float32
    fused: bool = True  # one kernel for what is several passes over memory, where the devices have one
    remat: bool = False  # recompute activations in the backward pass: less memory, about a third more work
    unroll: bool = False  # unroll cycles and layers: slower to compile, usually faster to run

    @model_validator(mode="after")
    def _shapes_fit(self) -> "TrmConfig":
        if isinstance(self.mixing, AttentionMixing):
            heads, width = self.mixing.num_heads, self.hidden_size
            if width % heads:
                raise ValueError(f"mixing.num_heads={heads} does not divide hidden_size={width}")
            if isinstance(self.mixing.positions, Rope) and (width // heads) % 2:
                raise ValueError(
                    f"RoPE needs heads of even width, got {width // heads} (hidden_size / mixing.num_heads)"
                )
        if isinstance(self.puzzle_embedding, PuzzleTable):
            room = self.puzzle_embedding.length * self.hidden_size
            if self.puzzle_embedding.width > room:
                raise ValueError(
                    f"puzzle_embedding.width={self.puzzle_embedding.width} does not fit its "
                    f"{self.puzzle_embedding.length} positions of hidden_size={self.hidden_size} ({room})"
                )
        return self


@dataclass(frozen=True)
class PuzzleShape:
    """What the data says about the model: tokens in a puzzle, tokens there are, identifiers there are."""

    seq_len: int
    vocab_size: int
    num_identifiers: int


class Z(NamedTuple):
    """The answer and the scratch state, each [B, T, D] in the forward dtype."""

    H: Array
    L: Array


class SingleZ(NamedTuple):
    """The one state of `single_z`, [B, T, D]. The authors' weights call its start L, too."""

    L: Array


class Cycles(NamedTuple):
    """How deep the recursion goes at one step of a run: int32, from 1 to the config's `H_cycles` and `L_cycles`."""

    H: Array
    L: Array


def num_puzzle_positions(config: TrmConfig) -> int:
    return config.puzzle_embedding.length if isinstance(config.puzzle_embedding, PuzzleTable) else 0


def init(config: TrmConfig, shape: PuzzleShape, key: Array) -> Params:
    D, T = config.hidden_size, num_puzzle_positions(config) + shape.seq_len
    keys = dict(zip(("tokens", "positions", "mixing", "mlp", "head", "H", "L"), jax.random.split(key, 7), strict=True))

    def inner(width: int) -> int:
        return layers.swiglu_width(width, config.expansion, config.mlp_multiple_of)

    embed = {"tokens": layers.truncated_normal(keys["tokens"], (shape.vocab_size, D), 1 / math.sqrt(D))}
    if isinstance(config.mixing.positions, Learned):
        embed["positions"] = layers.truncated_normal(keys["positions"], (T, D), 1 / math.sqrt(D))

    def net(mixing_key: Array, mlp_key: Array) -> Params:
        if isinstance(config.mixing, MlpMixing):
            mixing = {"token_mlp": layers.swiglu_init(mixing_key, config.num_layers, T, inner(T))}
        else:
            mixing = {"attention": layers.attention_init(mixing_key, config.num_layers, D, config.mixing.num_heads)}
        return mixing | {"mlp": layers.swiglu_init(mlp_key, config.num_layers, D, inner(D))}

    nets = {"layers_L" if config.separate_nets else "layers": net(keys["mixing"], keys["mlp"])}
    if config.separate_nets:  # the first net splits these keys in two
        nets["layers_H"] = net(*(jax.random.fold_in(keys[name], 2) for name in ("mixing", "mlp")))
    params: Params = {
        "embed": embed,
        **nets,
        "head": layers.linear_init(keys["head"], (D, shape.vocab_size)),
        # With the bias of -5 a fresh model does not think that it has finished.
        "q_head": {"weight": jnp.zeros((D, 2)), "bias": jnp.full((2,), config.stop_bias, jnp.float32)},
        "z_init": {name: layers.truncated_normal(keys[name], (D,), 1.0) for name in _states(config)},
    }
    if isinstance(config.puzzle_embedding, PuzzleTable):
        params["puzzle_table"] = jnp.zeros((shape.num_identifiers, config.puzzle_embedding.width))
    return params


def _states(config: TrmConfig) -> tuple[str, ...]:
    return ("L",) if config.single_z else ("H", "L")


def sharding_rules(config: TrmConfig) -> Rules:
    """`fsdp` splits a width that the data do not decide: positions and vocabulary are odd numbers."""
    tensor_fsdp = ("tensor", "fsdp")
    net = r"layers_[HL]" if config.separate_nets else "layers"
    rules = [
        (r"embed\..*", PartitionSpec(None, "fsdp")),
        (rf"{net}\.mlp\.gate_up", PartitionSpec(None, "fsdp", None, "tensor")),
        (rf"{net}\.mlp\.down", PartitionSpec(None, "tensor", "fsdp")),
        (r"head", PartitionSpec("fsdp")),
        (r"q_head\..*", PartitionSpec()),
        (r"z_init\..*", PartitionSpec()),
    ]
    if isinstance(config.mixing, MlpMixing):
        rules.append((rf"{net}\.token_mlp\.gate_up", PartitionSpec(None, None, None, tensor_fsdp)))
        rules.append((rf"{net}\.token_mlp\.down", PartitionSpec(None, tensor_fsdp)))
    else:
        rules.append((rf"{net}\.attention\.qkv", PartitionSpec(None, "fsdp", None, "tensor")))
        rules.append((rf"{net}\.attention\.out", PartitionSpec(None, "tensor", None, "fsdp")))
    if isinstance(config.puzzle_embedding, PuzzleTable):
        # Whole on every device: it has no optimizer state, and a split one would be put together at each look-up.
        rules.append((r"puzzle_table", PartitionSpec()))
    return rules


# Of the hidden layers, stacked over them. Gate and up, and q, k and v, are matrices of their own.
MATRICES: Matrices = (
    (r"layers(_[HL])?\.(token_)?mlp\.gate_up", Matrix((1,), (3,))),
    (r"layers(_[HL])?\.(token_)?mlp\.down", Matrix((1,), (2,))),
    (r"layers(_[HL])?\.attention\.qkv", Matrix((1,), (3, 4))),
    (r"layers(_[HL])?\.attention\.out", Matrix((1, 2), (3,))),
)


def initial_z(config: TrmConfig, params: Params, batch_size: int, num_tokens: int) -> Z | SingleZ:
    shape = (batch_size, num_puzzle_positions(config) + num_tokens, config.hidden_size)
    start = params["z_init"]
    states = (jnp.broadcast_to(start[name].astype(config.dtype), shape) for name in _states(config))
    return SingleZ(*states) if config.single_z else Z(*states)


def embed(config: TrmConfig, params: Params, tokens_BS: Array, rows_BE: Array | None) -> Array:
    """The input that is added to z_L in every cycle: puzzle positions, then tokens."""
    table_VD = params["embed"]["tokens"].astype(config.dtype)
    # A product with one-hot rows: its gradient is a matrix product too, where a gather's is a scatter, which on a GPU
    # is slow and adds up in another order each time.
    x_BTD = jax.nn.one_hot(tokens_BS, table_VD.shape[0], dtype=table_VD.dtype) @ table_VD
    if isinstance(config.puzzle_embedding, PuzzleTable):
        assert rows_BE is not None
        B, room = tokens_BS.shape[0], config.puzzle_embedding.length * config.hidden_size
        padded = jnp.pad(rows_BE.astype(config.dtype), ((0, 0), (0, room - rows_BE.shape[1])))
        x_BTD = jnp.concatenate([padded.reshape(B, -1, config.hidden_size), x_BTD], axis=1)
    if isinstance(config.mixing.positions, Learned):
        x_BTD = math.sqrt(0.5) * (x_BTD + params["embed"]["positions"].astype(x_BTD.dtype)[None])
    return math.sqrt(config.hidden_size) * x_BTD


def make_net(
    config: TrmConfig, num_positions: int, placement: Placement
) -> Callable[[Params, Array, Array | None], Array]:
    """The network of the recursion: `net(layers, h, injection) -> h`."""
    mixing, gather, group = config.mixing, placement.gather, _group(config)
    fused = placement if config.fused else ANYWHERE
    rope = _rope(config, num_positions)

    def block(x_BTD: Array, layer: Params) -> Array:
        if gather is not None:
            layer = gather(group, layer, config.dtype)
        if isinstance(mixing, AttentionMixing):
            x_BTD = layers.add_and_norm(x_BTD, layers.attention(layer["attention"], x_BTD, rope, fused), fused)
        else:
            x_BTD = layers.token_block(layer["token_mlp"], x_BTD, fused, config.gate)
        return layers.mlp_block(layer["mlp"], x_BTD, fused, config.gate)

    def net(stacked: Params, h_BTD: Array, injection_BTD: Array | None) -> Array:
        x_BTD = h_BTD if injection_BTD is None else h_BTD + injection_BTD
        if config.unroll:
            for i in range(config.num_layers):
                x_BTD = block(x_BTD, jax.tree.map(lambda weight, i=i: weight[i], stacked))
            return x_BTD
        return jax.lax.scan(lambda x, layer: (block(x, layer), None), x_BTD, stacked)[0]

    return jax.checkpoint(net) if config.remat else net


def _group(config: TrmConfig) -> str:
    return "layers_L" if config.separate_nets else "layers"  # of two nets, both are split alike


def _rope(config: TrmConfig, num_positions: int) -> tuple[Array, Array] | None:
    mixing = config.mixing
    if not isinstance(mixing, AttentionMixing) or not isinstance(mixing.positions, Rope):
        return None
    return layers.rope_tables(num_positions, config.hidden_size // mixing.num_heads, mixing.positions.theta)


def make_detached_net(
    config: TrmConfig, weights: Params, num_positions: int, placement: Placement
) -> tuple[Callable[[Any, Array, Array | None], Array], dict[str, Any]]:
    """As `make_net` and the weights that go with it, for passes without gradients: one kernel, where there is one."""
    dtype, mixing = jnp.dtype(config.dtype), config.mixing
    has_kernel = config.fused and config.gate == "swiglu"
    if not has_kernel or not tpu_net.suits(weights["L"], num_positions, dtype, placement):
        return make_net(config, num_positions, placement), weights
    rope = _rope(config, num_positions)

    def pack(stacked: Params) -> tpu_net.Net:
        if placement.gather is not None:
            stacked = placement.gather(_group(config), stacked, dtype)
        return tpu_net.pack(stacked, num_positions, dtype, rope)

    packed = {"L": pack(weights["L"])}
    packed["H"] = pack(weights["H"]) if config.separate_nets else packed["L"]
    num_heads = mixing.num_heads if isinstance(mixing, AttentionMixing) else 1

    def net(packed: Any, h_BTD: Array, injection_BTD: Array | None) -> Array:
        return tpu_net.apply(packed, h_BTD, injection_BTD, placement, epsilon=layers.RMS_EPSILON, num_heads=num_heads)

    return net, packed


def apply(
    config: TrmConfig,
    params: Params,
    z: Z | SingleZ,
    tokens_BS: Array,
    rows_BE: Array | None,
    placement: Placement = ANYWHERE,
    cycles: Cycles | None = None,
    *,
    gradients: bool = True,
) -> tuple[Z | SingleZ, Array, Array]:
    """One supervision step: the new z (detached), logits [B, S, V], and float32 halting logits [B, 2].

    With `cycles`, only so many of the config's cycles take effect. Without `gradients` it cannot be differentiated.
    """
    if placement.gather is not None:
        params |= {name: placement.gather(name, params[name], config.dtype) for name in ("embed", "head")}
    x_BTD = embed(config, params, tokens_BS, rows_BE)
    weights = {name: params[f"layers_{name}" if config.separate_nets else "layers"] for name in ("H", "L")}
    live_H, live_L = cycles or (None, None)

    class Pass(NamedTuple):
        """The net, its weights, and the input."""

        net: Callable[[Any, Array, Array | None], Array]
        weights: dict[str, Any]
        x: Array

        def think(self, z: Any, times: int, live: Array | None) -> Any:
            """Updates of the scratch state alone."""

            def update(z_L: Array) -> Array:
                return self.net(self.weights["L"], z_L, self.x if isinstance(z, SingleZ) else z.H + self.x)

            return z._replace(L=_repeat(update, z.L, times, config.unroll, live))

        def answer(self, z: Any) -> Any:
            if isinstance(z, SingleZ):
                return SingleZ(self.net(self.weights["H"], z.L, None))
            return z._replace(H=self.net(self.weights["H"], z.H, z.L))

    num_positions = x_BTD.shape[1]
    z, fixed_weights, fixed_x_BTD = jax.lax.stop_gradient((z, weights, x_BTD))
    detached = Pass(*make_detached_net(config, fixed_weights, num_positions, placement), fixed_x_BTD)
    last = Pass(make_net(config, num_positions, placement), weights, x_BTD) if gradients else detached

    def cycle(z: Any) -> Any:
        return detached.answer(detached.think(z, config.L_cycles, live_L))

    z = _repeat(cycle, z, config.H_cycles - 1, config.unroll, None if live_H is None else live_H - 1)
    if config.one_step_gradient:
        z = detached.think(z, config.L_cycles - 1, None if live_L is None else live_L - 1)
        z = last.think(jax.lax.stop_gradient(z), 1, None)
    else:
        z = last.think(jax.lax.stop_gradient(z), config.L_cycles, live_L)
    z = last.answer(z)

    answer_BTD = z.L if isinstance(z, SingleZ) else z.H
    logits_BSV = layers.linear(answer_BTD[:, num_puzzle_positions(config) :], params["head"])
    q_head = params["q_head"]
    q_B2 = layers.linear(answer_BTD[:, 0], q_head["weight"]) + q_head["bias"].astype(answer_BTD.dtype)[None]
    return jax.lax.stop_gradient(z), logits_BSV, q_B2.astype(jnp.float32)


def _repeat(body: Callable[[Any], Any], carry: Any, times: int, unroll: bool, live: Array | None = None) -> Any:
    """`live`: how many of the times take effect, where a run decides that as it goes. The others cost nothing, unless
    `vmap` is over runs that differ in it."""

    def turn(carry: Any, i: Any) -> Any:
        return body(carry) if live is None else jax.lax.cond(i < live, body, lambda carry: carry, carry)

    if unroll:
        for i in range(times):
            carry = turn(carry, i)
        return carry
    numbers = None if live is None else jnp.arange(times)
    return jax.lax.scan(lambda carry, i: (turn(carry, i), None), carry, numbers, length=times)[0]


def count_applications(config: TrmConfig, H_cycles: Any, L_cycles: Any, *, training: bool) -> Any:
    """Of the net in one step, each pass backward counted as two. Integers, or arrays of them."""
    differentiated = 2 if config.one_step_gradient else L_cycles + 1  # in the last cycle only
    return H_cycles * (L_cycles + 1) + 2 * training * differentiated


def count_net_flops(config: TrmConfig, shape: PuzzleShape) -> int:
    """Of one application to one example: matrix products only."""
    D, T = config.hidden_size, num_puzzle_positions(config) + shape.seq_len
    inner_D = layers.swiglu_width(D, config.expansion, config.mlp_multiple_of)
    inner_T = layers.swiglu_width(T, config.expansion, config.mlp_multiple_of)
    mlp = T * 3 * D * inner_D
    mix = D * 3 * T * inner_T if isinstance(config.mixing, MlpMixing) else T * 4 * D * D + 2 * T * T * D
    return 2 * config.num_layers * (mlp + mix)


def count_head_flops(config: TrmConfig, shape: PuzzleShape, *, training: bool) -> int:
    return 2 * (1 + 2 * training) * shape.seq_len * config.hidden_size * shape.vocab_size


def count_matmul_flops(config: TrmConfig, shape: PuzzleShape, *, training: bool = True) -> int:
    """Floating-point operations of one step for one example, with or without its backward pass: matrix products only,
    nothing recomputed."""
    applications: int = count_applications(config, config.H_cycles, config.L_cycles, training=training)
    return count_net_flops(config, shape) * applications + count_head_flops(config, shape, training=training)
