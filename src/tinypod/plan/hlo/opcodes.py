"""What XLA's opcodes and call targets mean for the count."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


COLLECTIVES = _words(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast"
)
# They name, select or order buffers, or are read where they are used.
FREE = _words(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency domain optimization-barrier"
    " opt-barrier partition-id replica-id get-dimension-size async-update"
)
FREE_CALLS = _words(
    "AllocateBuffer ConcatBitcast AssumeGatherIndicesInBound GatherScatterIndicesBitpacked PrepareAsyncCallStart"
    " PrepareAsyncCallDone AsyncCollectiveStart AsyncCollectiveDone Sharding annotate_device_placement"
)
# No matrix product in them; any other call that is not understood is named in `Program.opaque_calls`.
PLAIN_CALLS = _words("TopK __gpu$TopK __cub$DeviceRadixSort cu_threefry2x32_ffi PadToStatic SliceToDynamic")
# One element of the result needs more, or others, than the same element of the operand.
MIXES = _words("dot convolution sort scatter gather reduce-window custom-call reverse reduce map tuple")
SLICES = _words("slice dynamic-slice gather")
PASSED_ON = _words("copy copy-start copy-done bitcast convert reshape optimization-barrier opt-barrier")
DYNAMIC = _words("set-dimension-size PadToStatic SliceToDynamic")
