"""Workload: the operators, parameters and kept activations of one microbatch on one rank.

model_trace.py makes a workload by running the model on meta tensors. memory_estimate.py and
step_simulation.py only read the workload, so one trace is enough for thousands of layouts. This
file does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tutti.parallel.layout import Recompute

_MIB = 2**20


def block_bytes(size: int) -> int:
    """Return the bytes that torch's CUDA allocator counts for a tensor of `size` bytes.

    The allocator rounds sizes up to multiples of 512 bytes. A tensor of 10 MiB or more gets a
    segment whose size is a multiple of 2 MiB. If at most 1 MiB of the segment would remain free,
    the allocator does not split the segment, and the tensor's block is the whole segment.
    """
    rounded = -(-size // 512) * 512
    if rounded < 10 * _MIB:
        return rounded
    segment = -(-rounded // (2 * _MIB)) * 2 * _MIB
    return segment if segment - rounded <= _MIB else rounded


OperationKind = Literal["matmul", "convolution", "attention", "memory", "collective"]


@dataclass(frozen=True)
class Operation:
    """One operator of one microbatch on one rank."""

    name: str
    """The aten operator (mm, addmm, native_layer_norm), or the collective (all_reduce, all_gather,
    reduce_scatter)."""
    kind: OperationKind
    dtype: str
    """The dtype in which the operator computes: bf16, fp16, float32 or float64."""
    flops: float
    bytes: float
    """Bytes read and written. For a collective: the message size as nccl-tests counts it."""
    shape: tuple[int, ...] = ()
    """matmul: (batch, m, n, k). attention: (batch, heads, query length, key length, head dim)."""
    axis: str = ""
    """The mesh axis of a collective, such as `tp`, or empty."""


@dataclass(frozen=True)
class Parameter:
    """The part of one parameter that a tp rank holds, before FSDP2 shards it."""

    name: str
    elements: int
    element_bytes: int
    trained: bool
    first_dim: int = 1
    """The size of the first dim, along which FSDP2 shards the parameter."""
    sharing: str = ""
    """The first parameter that uses the same memory, if this is a tied weight. Otherwise empty."""

    @property
    def bytes(self) -> int:
        """The bytes of the parameter, in the dtype in which it is stored."""
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class ActivationMemory:
    """The activations and temporary results of one unit and one microbatch, in bytes.

    All numbers are relative to the memory that the earlier units keep for backward.
    """

    kept: int
    """Bytes that are kept from the forward of this unit until its backward."""
    forward_peak: int
    """The largest number of bytes during forward."""
    backward_peaks: tuple[tuple[int, int], ...]
    """The points in time in the unit's backward at which memory may be largest. Each point is a
    pair (bytes of activations and temporary results, bytes of this unit's complete parameter
    gradients). A point is left out if another point is at least as large in both numbers."""


@dataclass(frozen=True)
class Unit:
    """A block or another layer. Stages are cut between units, and FSDP2 gathers whole units."""

    name: str
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    recomputed: Mapping[Recompute, tuple[Operation, ...]]
    """The operators that each recomputation mode adds to backward."""
    parameters: tuple[Parameter, ...]
    """The parameters, in registration order."""
    memory: Mapping[Recompute, ActivationMemory]
    """The activations of one microbatch, for each recomputation mode."""
    output_bytes: int
    """Bytes of the activation that the next unit receives. Last unit: bytes of the outputs."""
    is_block: bool = False
    """Whether the unit is a repeated block. FSDP2 and recomputation wrap each block separately."""
    buffer_bytes: int = 0
    """Bytes of module buffers, such as the running statistics of batch norms."""

    @property
    def activations(self) -> dict[Recompute, int]:
        """Bytes that are kept for the backward of one microbatch."""
        return {mode: memory.kept for mode, memory in self.memory.items()}

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters. Tied parameters count in the first unit only."""
        return sum(each.bytes for each in self.parameters if not each.sharing)

    @property
    def trained_bytes(self) -> int:
        """The bytes of the parameters that get gradients."""
        return sum(each.bytes for each in self.parameters if each.trained and not each.sharing)


@dataclass(frozen=True)
class Workload:
    """The work of one tp rank for one microbatch."""

    units: tuple[Unit, ...]
    microbatch: int
    """The number of samples in the microbatch."""
    tp: int
    precision: str
    """The value of --precision: float32, bf16, fp16, float64 or model."""
    model: str = ""
    """The name of the model, for messages."""
    input_bytes: int = 0
    """Bytes of the inputs and targets of the microbatch."""
    model_flops: float = 0.0
    """FLOPs of forward and backward without recomputation, summed over the tp ranks."""
    sharded: bool = False
    """Whether FSDP2 gathers the parameters of blocks in the dtype of autocast."""
    shared_buffer_bytes: int = 0
    """Bytes of buffers that belong to no unit. Every pipeline stage holds a copy of them."""
    uncuttable: str = ""
    """Why the model cannot be cut into pipeline stages, or empty."""
    modes: tuple[Recompute, ...] = ("none",)
    """The recomputation modes that the model supports."""

    @property
    def parameters(self) -> int:
        """The number of parameters of one tp rank."""
        return sum(p.elements for unit in self.units for p in unit.parameters if not p.sharing)
