"""The matrix products of one instruction.

FLOPs are those of matrix products alone, as XLA counts them: the TPU compiler writes batched ones as convolutions with
padded, dilated windows, of which only positions inside the input count. Padding of TPU tiles is ignored, except by our
own TPU kernels, which state what they multiply.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tinypod.planning.hlo.text import Computation, Instruction, Module, find, ints, words

# No matrix product in them; any other call that is not understood is named in `Program.opaque_calls`.
_PLAIN_CALLS = words("TopK __gpu$TopK __cub$DeviceRadixSort cu_threefry2x32_ffi PadToStatic SliceToDynamic")
# JAX's splash attention, which says nothing of itself: products of a block of positions with another.
SPLASH_FORWARD, SPLASH_BACKWARD = "splash_mha_fwd", "splash_mha_dkv"
_SPLASH = {SPLASH_FORWARD: 2, SPLASH_BACKWARD: 5}


def flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Of an instruction, with those inside a fusion or a call."""
    if instruction.kind in ("fusion", "call"):
        called = module.called(instruction)
        return sum(flops(module, called, inner) for inner in called.instructions.values())
    return _flops(computation, instruction)


def _flops(computation: Computation, instruction: Instruction) -> float:
    kind = instruction.kind
    if kind == "dot":
        contracted = find(r"lhs_contracting_dims=\{([^}]*)\}", instruction.attributes)
        return _dot_flops(computation, instruction, ints(contracted))
    if kind == "convolution":
        left, right = (operand.arrays[0].dims for operand in computation.operands(instruction)[:2])
        return _convolution_flops(left, right, instruction.results[0].dims, instruction.attributes)
    if kind != "custom-call":
        return 0
    target = instruction.target
    if target.startswith("__cublas$"):
        contracted = find(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        return _dot_flops(computation, instruction, ints(contracted))
    if target.startswith("__onednn$matmul"):  # [..., m, k] or, transposed, [..., k, m]
        left, out = computation.operands(instruction)[0].arrays[0].dims, instruction.results[0]
        return 2 * out.size * left[-1] * left[-2] / out.dims[-2]
    if (products := _splash_products(instruction)) is not None:
        return products * _causal_flops(computation, instruction)
    return float(_stated_flops(instruction) or 0)


def _splash_products(instruction: Instruction) -> int | None:
    return next((products for name, products in _SPLASH.items() if instruction.name.startswith(name)), None)


def _causal_flops(computation: Computation, instruction: Instruction) -> float:
    """Of one product, [T, H] by [H, T] for each head, in blocks, without those that are wholly in the future."""
    mask, _, queries = (operand.arrays[0].dims for operand in computation.operands(instruction)[:3])
    (rows, columns), (length, width) = mask[-2:], queries[-2:]
    blocks = sum(math.ceil((row + 1) * columns / rows) for row in range(rows))
    return 2.0 * math.prod(queries[:-2]) * width * blocks * (length / rows) * (length / columns)


def _stated_flops(instruction: Instruction) -> str:
    """What a Pallas kernel says of itself: for TPUs as its cost, for GPUs in its metadata."""
    return find(r'flops(?:\\22|[\\":\s])+(\d+)', instruction.attributes)


def stated_share(instruction: Instruction) -> float | None:
    """Of the chip's peak, in the metadata of a TPU kernel."""
    stated = find(r'share_of_peak(?:\\22|[\\":\s])+([\d.]+)', instruction.attributes)
    return float(stated) if stated else None


def understood(instruction: Instruction) -> bool:
    target = instruction.target
    known = target.startswith(("__cublas$", "__onednn$matmul")) or target in _PLAIN_CALLS
    known = known or _splash_products(instruction) is not None
    return known or bool(_stated_flops(instruction))


def _dot_flops(computation: Computation, instruction: Instruction, contracted: Sequence[int]) -> float:
    left = computation.operands(instruction)[0].arrays[0]
    return 2 * instruction.results[0].size * math.prod(left.dims[dim] for dim in contracted)


def _convolution_flops(left: Sequence[int], right: Sequence[int], out: Sequence[int], attributes: str) -> float:
    left_labels, right_labels, out_labels = re.split(r"_|->", find(r"dim_labels=([\w?]+->[\w?]+)", attributes))
    window = find(r"\bwindow=\{([^}]*)\}", attributes)
    batch_groups = int(find(r"batch_group_count=(\d+)", attributes) or 1)
    flops = 2.0 * right[right_labels.index("i")] * right[right_labels.index("o")]
    flops *= left[left_labels.index("b")] / batch_groups
    spatial = sorted(label for label in out_labels if label.isdigit())
    for at, label in enumerate(spatial):
        flops *= _positions(
            left[left_labels.index(label)],
            right[right_labels.index(label)],
            out[out_labels.index(label)],
            low=_window(window, "pad", at, 0),
            stride=_window(window, "stride", at, 1),
            left_dilation=_window(window, "lhs_dilate", at, 1),
            right_dilation=_window(window, "rhs_dilate", at, 1),
        )
    return flops


def _window(window: str, name: str, at: int, default: int) -> int:
    """What a window has along one dimension; of padding, the lower: `pad=0_1x2_2`."""
    given = find(rf"\b{name}=(\S+)", window)
    return int(given.split("x")[at].partition("_")[0]) if given else default


@lru_cache(maxsize=4096)
def _positions(left: int, right: int, out: int, low: int, stride: int, left_dilation: int, right_dilation: int) -> int:
    """Pairs of output and kernel positions along one dimension that meet an input, not padding or a hole."""
    starts, total = np.arange(out) * stride - low, 0
    for kernel in range(right):
        at = starts + kernel * right_dilation
        meets = (at >= 0) & (at <= (left - 1) * left_dilation) & (at % left_dilation == 0)
        total += int(np.count_nonzero(meets))
    return total
