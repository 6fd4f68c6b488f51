"""Causal attention that never writes its [T, T] scores to memory: cuDNN's on GPUs, splash attention on TPUs.

Both take queries [B, T, N, H], and keys and values [B, T, K, H] whose heads are shared by groups of queries, and differ
from the plain formula by rounding alone.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from tinypod.sharding import Placement, free_axes

LANES = 128  # what a TPU's vector registers are wide: its kernel takes multiples of it
LARGEST_BLOCK = 512
# Kernels whose results are kept for the backward pass, by name; another one would be run again there.
KEPT_PRIMITIVES = ("dot_product_attention_fwd_wrapper", "pallas_call")  # cuDNN's, splash attention's


def causal(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, placement: Placement) -> Array | None:
    """None where these devices, or these shapes, have no such kernel."""
    length, head = q_BTNH.shape[1], q_BTNH.shape[3]
    half = q_BTNH.dtype in (jnp.bfloat16, jnp.float16)
    if placement.kernels in ("cuda", "hopper") and half and head % 8 == 0 and head <= 128:
        return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn")
    if placement.kernels == "tpu" and length % LANES == 0 and head % LANES == 0:
        return splash(q_BTNH, k_BTKH, v_BTKH, placement)
    return None


def splash(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, placement: Placement, interpret: bool = False) -> Array:
    """The partitioner does not look into a kernel, so that rows and heads are taken apart here."""
    mesh, axes = free_axes(placement.mesh)
    attend = partial(_splash, interpret=interpret)
    if not axes:
        return attend(q_BTNH, k_BTKH, v_BTKH)
    rows = tuple(axis for axis in ("data", "fsdp") if axis in axes)
    spec = PartitionSpec(rows or None, None, "tensor" if "tensor" in axes else None)
    return jax.shard_map(attend, mesh=mesh, axis_names=set(axes), in_specs=spec, out_specs=spec, check_vma=False)(
        q_BTNH, k_BTKH, v_BTKH
    )


def _splash(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, interpret: bool) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, length, heads, head = q_BTNH.shape
    block = math.gcd(length, LARGEST_BLOCK)
    attend = kernel.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
        block_sizes=kernel.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, use_fused_bwd_kernel=True
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    scaled = q_BTNH * jnp.asarray(1 / math.sqrt(head), q_BTNH.dtype)  # the kernel leaves this to its caller
    heads_first = (jnp.swapaxes(x, 1, 2) for x in (scaled, k_BTKH, v_BTKH))
    return jnp.swapaxes(jax.vmap(attend)(*heads_first), 1, 2).astype(q_BTNH.dtype)
