"""RingBuffer: a stream of equally large slots from one rank to another, in the reader's memory."""

from collections.abc import Iterator

import torch

from tutti.comm.shm import native
from tutti.comm.symmetric.heap import Heap
from tutti.structures.structure_base import Structure
from tutti.world.errors import UsageError

_END = 1 << 63  # in `filled`: the producer has finished; in `emptied`: the consumer has cancelled


class EndOfStream(Exception):
    """The producer has finished and the consumer has taken every slot."""


class ConsumerGone(RuntimeError):
    """The consumer has cancelled the stream and takes no more slots."""


class RingBuffer(Structure):
    """`slots` slots of one shape in the consumer's memory; the producer fills them in turn.

    Use it to pass activations to the next pipeline stage, batches from a loading rank to a training
    rank, gradients to a parameter server: an ordered stream, one producer, one consumer, without a
    copy on either side (`reserve` and `next` give views of the slot itself) and with back pressure:
    a full ring makes the producer wait.

    Do not use it between more than two ranks (make a ring per pair), or for messages of very
    different sizes (every slot has the size of the largest message). One thread at a time may use
    each end.

    All ranks of the heap create it together, including ranks that are neither producer nor
    consumer. A wait that fails raises Timeout, or PeerDied if the other end has died. Slots have
    `slot_shape` and `dtype`, or are `slot_bytes` raw bytes (uint8).

    Memory order: the producer writes the slot, then stores `filled` (release); the consumer loads
    `filled` (acquire) before it reads the slot. `emptied` does the same in the other direction. On
    CUDA each end synchronises its stream before it stores the word, which blocks the host.
    """

    def __init__(
        self,
        heap: Heap,
        producer: int,
        consumer: int,
        slots: int = 8,
        slot_shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
        slot_bytes: int | None = None,
    ) -> None:
        super().__init__(heap)
        if producer == consumer or not {producer, consumer} <= set(range(heap.size)):
            raise UsageError(
                f"producer {producer} and consumer {consumer} must be two ranks of 0 to "
                f"{heap.size - 1}"
            )
        if (slot_shape is None) == (slot_bytes is None) or slots < 1:
            raise UsageError(
                "a RingBuffer takes slot_shape (and dtype) or slot_bytes, and at least 1 slot"
            )
        if slot_shape is None:
            slot_shape, dtype = (int(slot_bytes or 0),), torch.uint8
        self.producer, self.consumer = producer, consumer
        self.slots = slots
        self.slot_shape = tuple(slot_shape)
        self.dtype = dtype
        self._core, self._quick = native.core(), native.core_holding_gil()
        self._slot_bytes = torch.Size(slot_shape).numel() * dtype.itemsize
        stride = -(-self._slot_bytes // 64) * 64
        ring = self._zeros((slots, stride), torch.uint8)
        # Each end waits on a word in its own memory, on a separate cache line.
        words = self._host_zeros(128)
        self._on_gpu = heap.device.type != "cpu"
        self._filled = words.address(consumer)
        self._emptied = words.address(producer) + 64
        self._views: list[torch.Tensor] = [
            slot[: self._slot_bytes].view(dtype).view(self.slot_shape)
            for slot in ring.peer(consumer)
        ]
        self._addresses = [view.data_ptr() for view in self._views]
        self._done = 0  # slots that this end has filled or emptied
        # Each end may proceed until `_done` reaches its limit; then it must read the other end's
        # word again. On ranks that are not this end the limit stays 0.
        self._fill_limit = slots if heap.rank == producer else 0
        self._take_limit = 0
        self._waits = 0
        self._ended = False
        self._reservation = _Reservation(self)
        self._next = _Next(self)
        heap.barrier()

    # ---- The producer's end ----

    def reserve(self, timeout: float | None = None) -> "_Reservation":
        """`with ring.reserve() as slot:` gives a free slot to write; the end of the block sends it.

        If the block raises an error, nothing is sent.
        """
        self._reservation.timeout = timeout
        return self._reservation

    def put(self, value: torch.Tensor, timeout: float | None = None) -> None:
        """Copy a tensor into the next slot and send it."""
        if self._done >= self._fill_limit:
            self._wait_for_free_slot(timeout)
        if value.shape != self.slot_shape or value.dtype is not self.dtype:
            raise UsageError(
                f"value is {value.dtype} of shape {tuple(value.shape)}, slots are {self.dtype} of "
                f"shape {self.slot_shape}"
            )
        slot = self._done % self.slots
        if value.is_cpu and value.is_contiguous() and not self._on_gpu:
            core = self._quick if self._slot_bytes <= 32 << 10 else self._core
            core.tutti_put_signal(
                *(self._addresses[slot], value.data_ptr(), self._slot_bytes),
                *(self._filled, self._done + 1, 0),
            )
            self._done += 1
        else:
            self._views[slot].copy_(value)
            self._publish_slot()

    def try_put(self, value: torch.Tensor) -> bool:
        """Put the value if a slot is free now; returns whether it was put."""
        if self._done >= self._fill_limit:
            self._check_free_slot()
            if self._done >= self._fill_limit:
                return False
        self.put(value)
        return True

    def finish(self) -> None:
        """End the stream: the consumer takes the remaining slots, then gets EndOfStream."""
        self._check_end("finish", self.producer)
        self._ended = True
        self._fill_limit = 0
        self._quick.tutti_store(self._filled, self._done | _END)

    # ---- The consumer's end ----

    def next(self, timeout: float | None = None) -> "_Next":
        """`with ring.next() as item:` gives the oldest slot as a view, freed at the block's end.

        Raises EndOfStream when the producer has finished. If the block raises an error, the slot
        is not freed.
        """
        self._next.timeout = timeout
        return self._next

    def get(self, out: torch.Tensor | None = None, timeout: float | None = None) -> torch.Tensor:
        """Copy the oldest slot, free the slot, and return the copy."""
        if self._done >= self._take_limit:
            self._wait_for_item(timeout)
        view = self._views[self._done % self.slots]
        out = view.clone() if out is None else out.copy_(view)
        self._publish_slot()
        return out

    def try_get(self) -> torch.Tensor | None:
        """As `get`, but returns None if no slot is filled now."""
        if self._done >= self._take_limit:
            self._check_item()
            if self._done >= self._take_limit:
                return None
        return self.get()

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the slots in order until the stream ends; a view is valid until the next slot."""
        while True:
            try:
                with self.next() as item:
                    yield item
            except EndOfStream:
                return

    def cancel(self) -> None:
        """End the stream as the consumer: the producer's next wait raises ConsumerGone."""
        self._check_end("cancel", self.consumer)
        self._ended = True
        self._take_limit = 0
        self._quick.tutti_store(self._emptied, self._done | _END)

    # ---- Both ends ----

    def __len__(self) -> int:
        """The number of slots that are filled and not yet freed, as this rank reads it now."""
        self._check_open()
        filled = self._quick.tutti_load(self._filled) & ~_END
        return int(filled - (self._quick.tutti_load(self._emptied) & ~_END))

    def stats(self) -> dict[str, int]:
        """The number of slots that this end has sent or freed, their bytes, and its waits."""
        done, waits = self._done, self._waits
        return {"slots": done, "bytes": done * self._slot_bytes, "waits": waits}

    def _publish_slot(self) -> None:
        """Publish that the current slot is filled, or empty again (release)."""
        if self._on_gpu:
            torch.cuda.current_stream(self.heap.device).synchronize()
        self._done += 1
        word = self._filled if self.rank == self.producer else self._emptied
        self._quick.tutti_store(word, self._done)

    def _check_free_slot(self) -> None:
        self._check_end("put", self.producer)
        self._update_fill_limit(self._quick.tutti_load(self._emptied))

    def _wait_for_free_slot(self, timeout: float | None) -> None:
        self._check_free_slot()
        if self._done >= self._fill_limit:
            self._waits += 1
            what = f"a free slot in a ring of {self.slots} slots to rank {self.consumer}"
            enough = self._done - self.slots + 1
            self._update_fill_limit(
                self._await(self._emptied, enough, self.consumer, timeout, what)
            )

    def _update_fill_limit(self, emptied: int) -> None:
        if emptied & _END:
            raise ConsumerGone(
                f"rank {self.consumer} has cancelled the ring after {emptied & ~_END} slots; "
                f"{self._done} were filled"
            )
        self._fill_limit = emptied + self.slots

    def _check_item(self) -> None:
        self._check_end("get", self.consumer)
        self._update_take_limit(self._quick.tutti_load(self._filled))

    def _wait_for_item(self, timeout: float | None) -> None:
        self._check_item()
        if self._done >= self._take_limit:
            self._waits += 1
            what = f"slot {self._done} of a ring from rank {self.producer}"
            self._update_take_limit(
                self._await(self._filled, self._done + 1, self.producer, timeout, what)
            )

    def _update_take_limit(self, filled: int) -> None:
        self._take_limit = filled & ~_END
        if filled & _END and self._done >= self._take_limit:
            raise EndOfStream(f"rank {self.producer} has finished after {self._done} slots")

    def _check_end(self, call: str, rank: int) -> None:
        self._check_open()
        if self.rank != rank:
            raise UsageError(
                f"{call} on rank {self.rank}: rank {self.producer} produces, rank {self.consumer} "
                "consumes"
            )
        if self._ended and call in ("put", "get"):
            ended_by = "finish" if call == "put" else "cancel"
            raise UsageError(f"{call} after {ended_by}(): this rank has ended the stream")

    def _release(self) -> None:
        self._fill_limit = self._take_limit = 0


class _SlotBlock:
    """A `with` block that holds a slot; its end publishes the slot unless there was an error."""

    __slots__ = ("_ring", "timeout")

    def __init__(self, ring: RingBuffer) -> None:
        self._ring = ring
        self.timeout: float | None = None

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is None:
            self._ring._publish_slot()


class _Reservation(_SlotBlock):
    """The producer's block with the next free slot."""

    __slots__ = ()

    def __enter__(self) -> torch.Tensor:
        ring = self._ring
        if ring._done >= ring._fill_limit:
            ring._wait_for_free_slot(self.timeout)
        return ring._views[ring._done % ring.slots]


class _Next(_SlotBlock):
    """The consumer's block with the oldest filled slot."""

    __slots__ = ()

    def __enter__(self) -> torch.Tensor:
        ring = self._ring
        if ring._done >= ring._take_limit:
            ring._wait_for_item(self.timeout)
        return ring._views[ring._done % ring.slots]
