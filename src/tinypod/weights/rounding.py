"""Plain quantisation in groups of inputs, as a baseline: int2, int4 and nf4 with a float16 scale for each group.

The weights stay floats that take few values: they are evaluated, exported and given adapters as any plain weights are.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from tinypod.errors import ConfigError, UserError

Kind = Literal["int4", "nf4", "int2"]
SCALE_BITS = 16


class Rounding(NamedTuple):
    kind: Kind
    group_size: int = 32  # inputs that share a scale

    @property
    def bits(self) -> int:
        return 2 if self.kind == "int2" else 4

    @property
    def bits_per_weight(self) -> float:
        return self.bits + SCALE_BITS / self.group_size


def check_installed() -> None:
    try:
        import qwix  # noqa: F401
    except ImportError:
        raise UserError("--round needs a package: pip install 'tinypod[baselines]'") from None


def round_weight(weight: Array, num_inputs: int, rounding: Rounding) -> Array:
    """A weight [*in, *out] of one layer, its first dimensions being inputs, as it is once quantised: float32."""
    import qwix

    outputs = weight.shape[num_inputs:]
    flat = weight.astype(jnp.float32).reshape(-1, math.prod(outputs))
    if flat.shape[0] % rounding.group_size:
        raise ConfigError(
            f"--group-size {rounding.group_size} does not divide the {flat.shape[0]} inputs of a linear layer; choose "
            "a divisor of them"
        )
    options = {"channelwise_axes": (1,), "tiled_axes": {0: rounding.group_size}, "scale_dtype": jnp.float16}
    quantised = qwix.quantize(flat, rounding.kind, **options)
    whole = dataclasses.replace(quantised, scale=quantised.scale.astype(jnp.float32))
    return qwix.dequantize(whole).reshape(weight.shape)
