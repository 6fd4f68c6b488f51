"""How much a model changes when its weights are quantised, on held-out text: of each linear layer's output, and of the
distribution at the end.

Each layer is given what the source feeds it, so that its error is its own; errors that add up over the layers are in
the divergence. Products are in float32, whatever the model's dtype: a bfloat16 output has a rounding error of its own.

Shape letters: those of `qwen3`, and C positions of a stretch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Group, RenderableType
from rich.text import Text

from tinypod import sharding
from tinypod.data import blocks
from tinypod.models import layers, qwen3
from tinypod.models.qwen3 import LINEARS, Params, Qwen3Config
from tinypod.runs.terminal import Listing
from tinypod.sharding import ANYWHERE, Placement
from tinypod.tasks.distill_losses import cut
from tinypod.weights.language_model import LanguageModel, place
from tinypod.weights.rounding import Rounding

TOKENS = 2048  # of held-out text that are looked at, in whole blocks
TINY = float(np.finfo(np.float32).tiny)
STRETCH = 128  # positions whose logits are there at a time


class Fidelity(NamedTuple):
    """The source against the target."""

    outputs: dict[str, float]  # ‖x(W - Ŵ)‖ / ‖xW‖ by linear layer, the mean over the layers
    divergence: float  # KL(source ‖ target) of the next token, nats, the mean over positions
    tokens: int


class Quantised(NamedTuple):
    """What an import has done to linear layers."""

    config: Qwen3Config
    rounding: Rounding | None
    errors: dict[str, float]  # ‖W - Ŵ‖ / ‖W‖ by linear layer, the mean over the layers
    fidelity: Fidelity | None = None
    without: str = ""  # why there is none


def measure(source: LanguageModel, target: LanguageModel, ids_BL: np.ndarray) -> Fidelity:
    """On blocks of tokens; both models on one mesh."""
    rows, length = ids_BL.shape
    shards = sharding.num_batch_shards(source.mesh)
    padding = -rows % shards
    batch = {
        "ids": np.pad(ids_BL.astype(np.int32), ((0, padding), (0, 0))),
        "count": np.pad(np.ones(rows, np.float32), (0, padding)),
    }
    placements = [place(model) for model in (source, target)]

    def compare(ours: Params, theirs: Params, batch: dict[str, Array]) -> tuple[dict[str, Array], Array]:
        ours, theirs = (
            qwen3.prepare(model.config, params, "float32") for model, params in ((source, ours), (target, theirs))
        )
        hidden, sums = _probe(source.config, target.config, ours, theirs, batch["ids"], batch["count"], placements)
        other = qwen3.apply(target.config, theirs, batch["ids"], placements[1])
        heads = qwen3.head(source.config, ours, placements[0]), qwen3.head(target.config, theirs, placements[1])
        return sums, _divergence(heads, hidden, other, batch["count"])

    compiled = jax.jit(compare, out_shardings=sharding.replicated(source.mesh))
    placed = sharding.put(batch, sharding.over_batch(source.mesh))
    sums, divergence = jax.device_get(compiled(source.params, target.params, placed))
    outputs = {name: float(np.mean(np.sqrt(x[:, 0] / np.maximum(x[:, 1], TINY)))) for name, x in sums.items()}
    return Fidelity(outputs, float(divergence) / (rows * length), rows * length)


def _probe(
    source: Qwen3Config,
    target: Qwen3Config,
    ours: Params,
    theirs: Params,
    ids_BT: Array,
    count_B: Array,
    placements: list[Placement],
) -> tuple[Array, dict[str, Array]]:
    """The source's last hidden states, and by linear layer [n, 2]: the squared sizes of the output's error and of the
    output."""
    rope = layers.rope_tables(ids_BT.shape[1], source.head_dim, source.rope_theta)

    def block(x_BTD: Array, pair: tuple[Params, Params]) -> tuple[Array, dict[str, Array]]:
        layer, other = (
            x if one.gather is None else one.gather("layers", x) for x, one in zip(pair, placements, strict=True)
        )
        sums: dict[str, Array] = {}

        def project(config: Qwen3Config, name: str, leaf: dict[str, Array], x: Array) -> Array:
            exact = qwen3.linear(source, name, leaf, x.astype(jnp.float32))
            error = exact - qwen3.linear(target, name, other[LINEARS[name][0]][name], x.astype(jnp.float32))
            squares = [jnp.sum(jnp.square(y).reshape(len(count_B), -1), axis=1) for y in (error, exact)]
            sums[name] = jnp.stack([jnp.sum(square * count_B) for square in squares])
            return qwen3.linear(config, name, leaf, x)

        q, k, v = qwen3.before_attention(source, layer, x_BTD, rope, project)
        y_BTNH = layers.causal_attention(q, k, v, ANYWHERE)
        return qwen3.after_attention(source, layer, x_BTD, y_BTNH, project), sums

    x_BTD = qwen3.look_up(source, ours, ids_BT, placements[0])
    x_BTD, sums = jax.lax.scan(block, x_BTD, (ours["layers"], theirs["layers"]))
    return layers.scaled_rms_norm(x_BTD, ours["norm"], source.norm_eps), sums


def _divergence(
    heads: tuple[Callable[[Array], Array], Callable[[Array], Array]], ours_BTD: Array, theirs_BTD: Array, count_B: Array
) -> Array:
    """KL summed over the positions of the rows that count."""

    def one(part: tuple[Array, Array, Array]) -> Array:
        ours_BCD, theirs_BCD, is_there_BC = part
        log_p, log_q = (jax.nn.log_softmax(head(x)) for head, x in zip(heads, (ours_BCD, theirs_BCD), strict=True))
        kl_BC = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        return jnp.sum(kl_BC * is_there_BC * count_B[:, None])

    is_there_BT = jnp.ones(ours_BTD.shape[:2])
    return jnp.sum(jax.lax.map(one, tuple(cut(x, STRETCH) for x in (ours_BTD, theirs_BTD, is_there_BT))))


def render(quantised: Quantised) -> RenderableType:
    config, rounding, fidelity = quantised.config, quantised.rounding, quantised.fidelity
    table = Listing("", ("linear", "bits", "rank", "relative error", *(["output error"] if fidelity else [])))
    for name in filter(quantised.errors.__contains__, LINEARS):
        bits, rank = (rounding.bits, "–") if rounding else (config.bits(name), str(config.rank(name)))
        outputs: Mapping[str, float] = fidelity.outputs if fidelity else {}
        table.add_row(
            name, str(bits), rank, f"{quantised.errors[name]:.4f}", *([f"{outputs[name]:.4f}"] if fidelity else [])
        )
    bits_per_weight = rounding.bits_per_weight if rounding else qwen3.bits_per_weight(config)
    lines = [f"{bits_per_weight:.2f} bits per weight of the linear layers, with scales in float16"]
    if fidelity:
        lines.append(
            f"KL from the source's distribution to this one's: {fidelity.divergence:.4f} nats per token, over "
            f"{fidelity.tokens:,} held-out tokens"
        )
    elif quantised.without:
        lines.append(f"output errors were not measured: {quantised.without}")
    return Group(table, *map(Text, lines))


def held_out_blocks(config: Any) -> np.ndarray:
    """The first of a config's held-out blocks, [n, L]; a DataError where they cannot be read."""
    folder = Path(config.data.path)
    held_out = blocks.Blocks(folder, blocks.read_manifest(folder), config.data.eval_split)
    return held_out.read(range(min(len(held_out), max(1, TOKENS // held_out.manifest.length))))["input_ids"]
