"""The Tiny Recursive Model (arXiv 2510.04871): one small network applied again and again to an answer z_H and a scratch
state z_L. Only the last of the H cycles carries gradients.

Parameters are a dict; the top-level keys are groups that the optimizer treats differently:
    embed, layers, head, q_head   trained; each leaf of `layers` is stacked over the layers
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
from tinypod.models import layers
from tinypod.sharding import Gather, Rules

Params = dict[str, Any]


class Rope(Config):
    kind: Literal["rope"] = "rope"
    theta: PositiveFloat = 10_000.0


class Learned(Config):
    kind: Literal["learned"] = "learned"


class NoPositions(Config):
    kind: Literal["none"] = "none"


class MlpMixing(Config):
    """SwiGLU over the token axis. There are no heads to rotate, so no RoPE."""

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
    mixing: Annotated[MlpMixing | AttentionMixing, Field(discriminator="kind")]
    puzzle_embedding: Annotated[PuzzleTable | NoPuzzleTable, Field(discriminator="kind")]
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of the forward pass; weights are float32
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
    if isinstance(config.mixing, MlpMixing):
        mixing = {"token_mlp": layers.swiglu_init(keys["mixing"], config.num_layers, T, inner(T))}
    else:
        mixing = {"attention": layers.attention_init(keys["mixing"], config.num_layers, D, config.mixing.num_heads)}
    params: Params = {
        "embed": embed,
        "layers": mixing | {"mlp": layers.swiglu_init(keys["mlp"], config.num_layers, D, inner(D))},
        "head": layers.linear_init(keys["head"], (D, shape.vocab_size)),
        # Zero weights and a bias of -5: a fresh model does not think that it has finished.
        "q_head": {"weight": jnp.zeros((D, 2)), "bias": jnp.full((2,), -5.0, jnp.float32)},
        "z_init": {name: layers.truncated_normal(keys[name], (D,), 1.0) for name in ("H", "L")},
    }
    if isinstance(config.puzzle_embedding, PuzzleTable):
        params["puzzle_table"] = jnp.zeros((shape.num_identifiers, config.puzzle_embedding.width))
    return params


def sharding_rules(config: TrmConfig) -> Rules:
    """`fsdp` splits a width that the data do not decide: positions and vocabulary are odd numbers."""
    tensor_fsdp = ("tensor", "fsdp")
    rules = [
        (r"embed\..*", PartitionSpec(None, "fsdp")),
        (r"layers\.mlp\.gate_up", PartitionSpec(None, "fsdp", None, "tensor")),
        (r"layers\.mlp\.down", PartitionSpec(None, "tensor", "fsdp")),
        (r"head", PartitionSpec("fsdp")),
        (r"q_head\..*", PartitionSpec()),
        (r"z_init\..*", PartitionSpec()),
    ]
    if isinstance(config.mixing, MlpMixing):
        rules.append((r"layers\.token_mlp\.gate_up", PartitionSpec(None, None, None, tensor_fsdp)))
        rules.append((r"layers\.token_mlp\.down", PartitionSpec(None, tensor_fsdp)))
    else:
        rules.append((r"layers\.attention\.qkv", PartitionSpec(None, "fsdp", None, "tensor")))
        rules.append((r"layers\.attention\.out", PartitionSpec(None, "tensor", None, "fsdp")))
    if isinstance(config.puzzle_embedding, PuzzleTable):
        # Whole on every device: it has no optimizer state, and a split one would be put together at each look-up.
        rules.append((r"puzzle_table", PartitionSpec()))
    return rules


def initial_z(config: TrmConfig, params: Params, batch_size: int, num_tokens: int) -> Z:
    shape = (batch_size, num_puzzle_positions(config) + num_tokens, config.hidden_size)
    start = params["z_init"]
    return Z(*(jnp.broadcast_to(start[name].astype(config.dtype), shape) for name in ("H", "L")))


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


def make_net(config: TrmConfig, num_positions: int, gather: Gather | None) -> Callable[[Params, Array, Array], Array]:
    """The network of the recursion: `net(layers, h, injection) -> h`."""
    mixing = config.mixing
    rope = None
    if isinstance(mixing, AttentionMixing) and isinstance(mixing.positions, Rope):
        rope = layers.rope_tables(num_positions, config.hidden_size // mixing.num_heads, mixing.positions.theta)

    def block(x_BTD: Array, layer: Params) -> Array:
        if gather is not None:
            layer = gather("layers", layer)
        if isinstance(mixing, AttentionMixing):
            x_BTD = layers.rms_norm(x_BTD + layers.attention(layer["attention"], x_BTD, rope))
        else:
            x_BTD = layers.rms_norm(x_BTD + layers.token_swiglu(layer["token_mlp"], x_BTD), axis=1)
        return layers.rms_norm(x_BTD + layers.swiglu(layer["mlp"], x_BTD))

    def net(stacked: Params, h_BTD: Array, injection_BTD: Array) -> Array:
        x_BTD = h_BTD + injection_BTD
        if config.unroll:
            for i in range(config.num_layers):
                x_BTD = block(x_BTD, jax.tree.map(lambda weight, i=i: weight[i], stacked))
            return x_BTD
        return jax.lax.scan(lambda x, layer: (block(x, layer), None), x_BTD, stacked)[0]

    return jax.checkpoint(net) if config.remat else net


def apply(
    config: TrmConfig, params: Params, z: Z, tokens_BS: Array, rows_BE: Array | None, gather: Gather | None = None
) -> tuple[Z, Array, Array]:
    """One supervision step: the new z (detached), logits [B, S, V], and float32 halting logits [B, 2].

    With `gather`, weights that lie split over devices are made whole where they are used.
    """
    if gather is not None:
        params = params | {name: gather(name, params[name]) for name in ("embed", "head")}
    x_BTD = embed(config, params, tokens_BS, rows_BE)
    net = make_net(config, x_BTD.shape[1], gather)

    def cycle(stacked: Params, x: Array, z: Z) -> Z:
        z_L = _repeat(lambda z_L: net(stacked, z_L, z.H + x), z.L, config.L_cycles, config.unroll)
        return Z(net(stacked, z.H, z_L), z_L)

    detached = jax.lax.stop_gradient((params["layers"], x_BTD))
    z = _repeat(lambda z: cycle(*detached, z), z, config.H_cycles - 1, config.unroll)
    z = cycle(params["layers"], x_BTD, jax.lax.stop_gradient(z))

    logits_BSV = layers.linear(z.H[:, num_puzzle_positions(config) :], params["head"])
    q_head = params["q_head"]
    q_B2 = layers.linear(z.H[:, 0], q_head["weight"]) + q_head["bias"].astype(z.H.dtype)[None]
    return jax.lax.stop_gradient(z), logits_BSV, q_B2.astype(jnp.float32)


def _repeat(body: Callable[[Any], Any], carry: Any, times: int, unroll: bool) -> Any:
    if unroll:
        for _ in range(times):
            carry = body(carry)
        return carry
    return jax.lax.scan(lambda carry, _: (body(carry), None), carry, length=times)[0]


def count_matmul_flops(config: TrmConfig, shape: PuzzleShape, *, training: bool = True) -> int:
    """Floating-point operations of one step for one example, with or without its backward pass: matrix products only,
    nothing recomputed."""
    D, T = config.hidden_size, num_puzzle_positions(config) + shape.seq_len
    inner_D = layers.swiglu_width(D, config.expansion, config.mlp_multiple_of)
    inner_T = layers.swiglu_width(T, config.expansion, config.mlp_multiple_of)
    mlp = T * 3 * D * inner_D
    mix = D * 3 * T * inner_T if isinstance(config.mixing, MlpMixing) else T * 4 * D * D + 2 * T * T * D
    calls = config.L_cycles + 1
    applications = (config.H_cycles + 2 * training) * calls  # only the last cycle is differentiated
    head = (1 + 2 * training) * shape.seq_len * D * shape.vocab_size
    return 2 * (config.num_layers * (mlp + mix) * applications + head)
