"""Pools of reusable buffers: memory is taken, used and given back, and not allocated again.

Allocating costs most where it hurts most: fresh host memory is zeroed page by page as it is first
written, and pinning it for the GPU takes about a millisecond for each megabyte or two.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from tutti.world.errors import UsageError

_SMALLEST = 512


@dataclass
class PoolStats:
    """What a pool did and what it holds."""

    hits: int = 0  # taken from what was there
    misses: int = 0  # allocated
    bytes_free: int = 0  # held, and not in use
    bytes_in_use: int = 0


class BufferPool:
    """Reusable tensors on one device.

        pool = BufferPool("cpu", limit_bytes=1 << 30)
        with pool.take((1024, 1024), torch.float32) as tensor:
            …

    A buffer may be a little larger than asked for (sizes come in steps of an eighth), and holds
    whatever its last user left in it. Do not keep the tensor beyond the block. Safe to use from
    several threads. On CUDA, a buffer given back on one stream and taken on another makes the
    latter wait for the former.
    """

    def __init__(
        self, device: str | torch.device = "cpu", *, limit_bytes: int | None = None
    ) -> None:
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = {}
        self._lock = threading.Lock()
        self._stats = PoolStats()

    def take(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> "Lease":
        """Borrow a tensor, best in a `with` statement; it is given back at its end."""
        sizes = torch.Size((shape,) if isinstance(shape, int) else shape)
        wanted = sizes.numel() * dtype.itemsize
        buffer = self._find(step(wanted))
        return Lease(self, buffer, buffer[:wanted].view(dtype).view(sizes))

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; `Lease` does this."""
        with self._lock:
            self._free.setdefault(buffer.nbytes, []).append((buffer, self._mark()))
            self._stats.bytes_in_use -= buffer.nbytes
            self._stats.bytes_free += buffer.nbytes

    def trim(self, to_bytes: int = 0) -> int:
        """Let go of free buffers, the largest first, until at most so many bytes are held free.

        Returns how many bytes were let go.
        """
        with self._lock:
            return self._trim(to_bytes)

    def stats(self) -> PoolStats:
        """A copy of the counts."""
        with self._lock:
            return PoolStats(**vars(self._stats))

    def _find(self, size: int) -> torch.Tensor:
        with self._lock:
            free = self._free.get(size, [])
            for number in reversed(range(len(free))):  # the last one is still in the cache
                buffer, mark = free[number]
                if self._is_ready(mark):
                    del free[number]
                    self._stats.hits += 1
                    self._stats.bytes_free -= size
                    self._stats.bytes_in_use += size
                    return buffer
            self._make_room(size)
            buffer = self._allocate(size)
            self._stats.misses += 1
            self._stats.bytes_in_use += size
            return buffer

    def _make_room(self, size: int) -> None:
        if self.limit_bytes is None:
            return
        used = self._stats.bytes_in_use
        self._trim(max(0, self.limit_bytes - used - size))
        if used + size > self.limit_bytes:
            raise UsageError(
                f"the pool on {self.device} has {used} bytes in use and {size} more are asked for, "
                f"above limit_bytes={self.limit_bytes}: give buffers back earlier or raise it"
            )

    def _trim(self, to_bytes: int) -> int:
        before = self._stats.bytes_free
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._stats.bytes_free > to_bytes:
                self._free[size].pop()
                self._stats.bytes_free -= size
            if not self._free[size]:
                del self._free[size]
        return before - self._stats.bytes_free

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _mark(self) -> Any:
        """What tells later whether the buffer's last user is done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _is_ready(self, mark: Any) -> bool:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)
        return True


class PinnedPool(BufferPool):
    """Reusable page-locked host memory, from which copies to a GPU run in the background.

        with pool.take(batch.shape, batch.dtype) as staged:
            staged.copy_(batch)
            on_gpu.copy_(staged, non_blocking=True)

    A buffer given back is taken again only when the copies that were under way on the current
    stream are done. Without a GPU it is ordinary memory; `is_pinned` and `reason` say which.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        super().__init__("cpu", limit_bytes=limit_bytes)
        self.is_pinned = torch.cuda.is_available()
        self.reason = (
            "page-locked, for copies to the GPU in the background"
            if self.is_pinned
            else "ordinary memory: no GPU is visible that page-locked memory would serve"
        )

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.is_pinned)

    def _mark(self) -> Any:
        if not self.is_pinned:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _is_ready(self, mark: Any) -> bool:
        # The host writes next, and it cannot be made to wait for a stream: take another buffer.
        return mark is None or bool(mark.query())


class Lease:
    """A borrowed tensor; in a `with` statement, the tensor itself."""

    def __init__(self, pool: BufferPool, buffer: torch.Tensor, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._pool = pool
        self._buffer: torch.Tensor | None = buffer

    def release(self) -> None:
        """Give the tensor back; a second time does nothing."""
        if self._buffer is not None:
            self._pool.give_back(self._buffer)
            self._buffer = None

    def __enter__(self) -> torch.Tensor:
        return self.tensor

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.release()


def step(size: int) -> int:
    """The size rounded up to the next eighth of a power of two: at most 12.5 % is wasted."""
    if size <= _SMALLEST:
        return _SMALLEST
    eighth = 1 << (size - 1).bit_length() - 4
    return -(-size // eighth) * eighth
