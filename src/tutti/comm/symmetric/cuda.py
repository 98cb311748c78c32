"""The heap's memory on NVIDIA GPUs: one block of torch's symmetric memory per rank.

All calls are enqueued on the current stream, in its order. Memory order: a signal is stored with
release at system scope by a kernel that follows the put on its stream, and awaited with acquire, so
that what follows the wait on the waiting stream sees what was put. Between streams of one rank the
only order is the one that events give.

A wait runs on the GPU and cannot raise. When its time is over it leaves a mark and lets the stream
go on; the next call on the heap raises Timeout, or PeerDied if the process of a rank has ended.
Kernels that wait for each other need to run at the same time: ranks that share a GPU need MPS
(`tutti run --ranks-per-gpu`), without which they advance by milliseconds. And CUDA loads a kernel
when it is first used, which may wait for all that runs: where one stream waits for what another is
still to send, use the sending kernels once before, or set CUDA_MODULE_LOADING=EAGER.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.symmetric.cuda_collectives import CudaCollectives
from tutti.comm.symmetric.cuda_words import Words
from tutti.comm.symmetric.meeting import (
    Meeting,
    refuse_different_calls,
    refuse_different_heaps,
)
from tutti.comm.symmetric.memory import CHANNELS, Algorithm
from tutti.world.errors import UsageError

_ALLOW_SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class CudaMemory:
    """See Memory. Made on all ranks of a group together."""

    alignment = 256

    def __init__(
        self,
        group: dist.ProcessGroup,
        bytes: int,
        device: torch.device,
        backend: str,
        signals: int,
        timeout: float,
        reason: str,
    ) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self.backend = backend
        self.bytes = bytes
        self.device = device
        self.signals = signals
        self.rank = group.rank()
        self.size = group.size()
        self.group_name = group.group_name
        # The block of each rank: signals, then for every channel one word per peer, then how often
        # this rank has met on each channel, then the data.
        self._arrivals_at = 8 * signals
        self._counts_at = self._arrivals_at + 8 * (CHANNELS + 1) * self.size
        end = self._counts_at + 8 * (CHANNELS + 1)
        self._data_at = -(-end // self.alignment) * self.alignment

        self._meeting = Meeting(group, "symmetric.Heap", timeout)
        with torch.cuda.device(device):
            self._words = Words(self.rank, device)
            cards = self._introduce(bytes, signals)
            here = cards[self.rank]["boot"]
            self._words.pids = [card["pid"] if card["boot"] == here else None for card in cards]
            self.sharing = max(sum(c["gpu"] == card["gpu"] for c in cards) for card in cards)
            if self.sharing > 1 and backend == "nvshmem":
                raise UsageError(
                    f"backend='nvshmem': {self.sharing} ranks share a GPU, where torch's NVSHMEM "
                    "crashes: use backend='cuda', or a GPU per rank"
                )
            _choose(symm_mem, backend, device)
            shared = f"; {self.sharing} ranks share a GPU" if self.sharing > 1 else ""
            self.reason = reason + shared
            with _sharing_allowed(self.sharing > 1):
                self._block = self._allocate(symm_mem, self._data_at + bytes)
                self._handle: Any = symm_mem.rendezvous(self._block, group.group_name)
            self._bases = [int(pointer) for pointer in self._handle.buffer_ptrs]
            if 0 in self._bases:
                raise UsageError(
                    f"rank {self.rank} cannot reach the memory of rank {self._bases.index(0)} "
                    f"directly: a heap needs GPUs that are linked (backend={backend!r})"
                )
            self._table = torch.tensor(self._bases, dtype=torch.int64, device=device)
            self._collectives = CudaCollectives(self)
            self.puts = self.put_bytes = self.gets = self.get_bytes = 0
            self.waits = self.barriers = 0
            # All blocks are zeroed and mapped when all ranks say so.
            self._meeting.tell("ready")
            self.meet(CHANNELS, timeout, "the first barrier")
            self.quiet()

    def _introduce(self, bytes: int, signals: int) -> list[dict[str, Any]]:
        """Compile the kernels, and meet the other ranks."""
        failure = None
        try:
            self._words.compile()
        except Exception as error:
            failure = (
                f"its kernels do not compile or run ({type(error).__name__}: {error}): Triton "
                "needs a C compiler"
            )
        properties = torch.cuda.get_device_properties(self.device)
        gpu = str(getattr(properties, "uuid", f"{socket.gethostname()}:{self.device}"))
        cards = self._meeting.introduce([bytes, signals], failure, {"gpu": gpu})
        refuse_different_heaps(cards)
        return cards

    def _allocate(self, symm_mem: Any, bytes: int) -> torch.Tensor:
        """A zeroed block, when every rank has got one: torch's rendezvous would wait for ever."""
        failure = None
        try:
            block: torch.Tensor = symm_mem.empty(bytes, dtype=torch.uint8, device=self.device)
            block.zero_()
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            failure = str(error).partition("\n")[0]
        for rank, text in enumerate(self._meeting.tell(failure)):
            if text is not None:
                raise UsageError(f"rank {rank} got no {bytes} bytes on its GPU: {text}")
        return block

    # ---- Bytes ----

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return self._view(rank, self._data_at + offset, shape, dtype)

    def _view(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        count = torch.Size(shape).numel()
        if rank == self.rank:  # a view of the block itself, as torch's own operators ask for
            return self._block[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        buffer: torch.Tensor = self._handle.get_buffer(
            rank, list(shape), dtype, storage_offset=offset // dtype.itemsize
        )
        return buffer

    def address(self, rank: int, offset: int) -> int:
        return self._bases[rank] + self._data_at + offset

    def put(self, to: int, offset: int, source: torch.Tensor, bytes: int) -> None:
        self.check()
        self.puts += 1
        self.put_bytes += bytes
        target = self.view(to, offset, tuple(source.shape), source.dtype)
        target.copy_(source.detach(), non_blocking=True)

    def get(self, source: int, offset: int, out: torch.Tensor, bytes: int) -> None:
        self.check()
        self.gets += 1
        self.get_bytes += bytes
        # A copy to the host is complete on return, as everywhere in torch.
        out.copy_(self.view(source, offset, tuple(out.shape), out.dtype))

    def put_signal(
        self,
        to: int,
        offset: int,
        source: torch.Tensor,
        bytes: int,
        slot: int,
        value: int,
        add: int,
    ) -> None:
        self.put(to, offset, source, bytes)
        signal = self.signal_address(to, slot)
        (self._words.add if add else self._words.store)(signal, value)

    # ---- Words ----

    def signal_address(self, rank: int, slot: int) -> int:
        return self._bases[rank] + 8 * slot

    def load(self, address: int, /) -> int:
        return self._words.load(address)

    def store(self, address: int, value: int, /) -> None:
        self.check()
        self._words.store(address, value)

    def add(self, address: int, value: int, /) -> None:
        self.check()
        self._words.add(address, value)

    def fetch_add(self, address: int, value: int, /) -> int:
        return self._words.fetch_add(address, value)

    def compare_swap(self, address: int, expected: int, desired: int, /) -> int:
        return self._words.compare_swap(address, expected, desired)

    def wait_word(
        self, address: int, at_least: int, source: int | None, timeout: float, what: str
    ) -> None:
        self.check()
        self.waits += 1
        whom = "" if source is None else f" from rank {source}"
        self._words.wait(address, at_least, timeout, f"{what}{whom} to reach {at_least}")

    # ---- Order and meeting points ----

    def fence(self) -> None:
        """Nothing to do: a stream is in order, and every signal is a release at system scope."""

    def quiet(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        self.check()

    def barrier(self, channel: int, timeout: float) -> None:
        self.check()
        self.barriers += 1
        self.meet(channel, timeout, "a barrier")

    def meet(self, channel: int, timeout: float, what: str) -> None:
        """A barrier between the current streams of all ranks; collectives have channel CHANNELS."""
        arrivals = self._arrivals_at + 8 * channel * self.size
        count = self._counts_at + 8 * channel
        table = self._table.data_ptr()
        self._words.meet(table, self.rank, self.size, arrivals, count, timeout, what)

    def agree(self, call: str, timeout: float) -> None:
        # The stream may still use what is freed or handed out again.
        self.quiet()
        self._meeting.timeout = timeout
        refuse_different_calls(self._meeting.tell(call))

    @property
    def in_step(self) -> bool:
        torch.cuda.synchronize(self.device)
        return self._words.in_step

    @property
    def check(self) -> Callable[[], None]:
        """Raises what a wait on the GPU could not."""
        return self._words.check

    # ---- Collectives ----

    def all_reduce(
        self,
        local: torch.Tensor,
        offset: int,
        op: str,
        algorithm: Algorithm,
        out: torch.Tensor,
        out_offset: int | None,
        timeout: float,
    ) -> None:
        self.check()
        self._collectives.all_reduce(local, offset, op, algorithm, out, out_offset, timeout)

    def sum_in_place(self, local: torch.Tensor) -> Callable[[], object] | None:
        return self._collectives.sum_in_place(local)

    def all_reduce_staged(
        self, buffer: torch.Tensor, offset: int, tensor: torch.Tensor, op: str, timeout: float
    ) -> None:
        self.check()
        self._collectives.all_reduce_staged(buffer, offset, tensor, op, timeout)

    def all_gather(
        self, local: torch.Tensor, offset: int, out: torch.Tensor, timeout: float
    ) -> None:
        self.check()
        self._collectives.all_gather(local, offset, out, timeout)

    def reduce_scatter(
        self, local: torch.Tensor, offset: int, op: str, out: torch.Tensor, timeout: float
    ) -> None:
        self.check()
        self._collectives.reduce_scatter(local, offset, op, out, timeout)

    # ---- Life ----

    def stats(self) -> dict[str, int]:
        names = ("puts", "put_bytes", "gets", "get_bytes", "waits", "barriers")
        return {name: getattr(self, name) for name in names} | {
            "collectives": self._collectives.calls,
            "ranks_on_gpu": self.sharing,
        }

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        del self._collectives, self._handle, self._block


def _choose(symm_mem: Any, backend: str, device: torch.device) -> None:
    """Tell torch which of its backends is meant; it can be told once, before the first use."""
    wanted = {"cuda": "CUDA", "nvshmem": "NVSHMEM"}[backend]
    now = symm_mem.get_backend(device) if hasattr(symm_mem, "get_backend") else None
    if now == wanted or (now is None and wanted == "CUDA"):  # which is torch's default
        return
    try:
        symm_mem.set_backend(wanted)
    except RuntimeError as error:
        raise UsageError(
            f"backend={backend!r}: this process already uses torch's {now} symmetric memory, and "
            f"torch keeps to one: make all heaps with the same backend ({error})"
        ) from None


@contextlib.contextmanager
def _sharing_allowed(sharing: bool) -> Iterator[None]:
    """Torch refuses ranks that share a GPU unless it is told that they are meant to."""
    before = os.environ.get(_ALLOW_SHARING)
    if sharing:
        os.environ[_ALLOW_SHARING] = "1"
    try:
        yield
    finally:
        if sharing and before is None:
            del os.environ[_ALLOW_SHARING]
