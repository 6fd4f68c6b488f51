"""Low-rank adapters: y = x W + (x A) B · alpha / rank, over a base that may be frozen. They are float32, and multiplied
in the dtype of x.

They stand in a linear leaf beside its weight, plain or low-bit: `lora_A` [..., *in, r] and `lora_B` [..., r, *out].
Gradients pass through the base: only its weights are constants, not its output.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field, PositiveFloat, PositiveInt

from tinypod.config import Config

Target = Literal["q", "k", "v", "o", "gate", "up", "down"]
STD = 0.02  # of a new A; a new B is zero, so that a new adapter changes nothing


class Lora(Config):
    rank: PositiveInt = 8
    alpha: PositiveFloat | None = None  # null: the rank, for a scale of 1
    targets: Annotated[list[Target], Field(min_length=1, default=["q", "v", "o", "gate", "up", "down"])]

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


def init(key: Array, layers: int, inputs: Sequence[int], outputs: Sequence[int], rank: int) -> dict[str, Array]:
    return {
        "lora_A": STD * jax.random.normal(key, (layers, *inputs, rank)),
        "lora_B": jnp.zeros((layers, rank, *outputs)),
    }


def apply(leaf: dict[str, Array], x: Array, scale: float) -> Array:
    """What the adapter of one layer adds. `x`: [..., *in]."""
    a, b = leaf["lora_A"].astype(x.dtype), (scale * leaf["lora_B"]).astype(x.dtype)
    return jnp.tensordot(jnp.tensordot(x, a, axes=a.ndim - 1), b, axes=1)


def delta(leaf: dict[str, Array], scale: float) -> Array:
    """The same as a weight: [*in, *out]."""
    return scale * jnp.tensordot(leaf["lora_A"], leaf["lora_B"], axes=1)
