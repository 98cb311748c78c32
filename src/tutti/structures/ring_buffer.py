"""RingBuffer: a bounded queue from one rank to another, in the consumer's memory."""

from collections.abc import Iterator

import torch

from tutti.comm.symmetric.heap import Heap
from tutti.structures.structure_base import Structure
from tutti.world.errors import UsageError

_END = 1 << 63  # the bit that finish() sets in `filled` and cancel() sets in `emptied`


class EndOfStream(Exception):
    """The producer has called finish(), and the consumer has taken every slot."""


class ConsumerGone(RuntimeError):
    """The consumer has called cancel() and takes no more slots."""


class RingBuffer(Structure):
    """A queue of `slots` slots of one shape. The producer fills the slots in order.

    Use it to pass activations to the next pipeline stage, batches from a loading rank to a training
    rank, or gradients to a parameter server. The stream is ordered and has one producer and one
    consumer. The slots are in the consumer's memory. Neither end needs a copy, because `reserve`
    and `next` give views of a slot. If the ring is full, the producer waits.

    Do not use it between more than two ranks (make a ring per pair), or for messages of very
    different sizes (every slot has the size of the largest message). Each end may be used by
    only one thread at a time.

    All ranks of the heap create the ring together, including ranks that are neither producer nor
    consumer. A wait that fails raises Timeout, or PeerDied if the other end has died. Slots have
    `slot_shape` and `dtype`, or are `slot_bytes` raw bytes (uint8).

    Memory order: the producer writes the slot, then stores `filled` (release). The consumer loads
    `filled` (acquire) before it reads the slot. In the other direction, the consumer stores
    `emptied` after it has read the slot, and the producer loads `emptied` before it writes the slot
    again. On CUDA, each end synchronizes its stream before it stores `filled` or `emptied`. This
    blocks the host.
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
                f"producer and consumer must be two different ranks of 0 to {heap.size - 1}, got "
                f"{producer} and {consumer}"
            )
        if (slot_shape is None) == (slot_bytes is None) or slots < 1:
            raise UsageError(
                f"a RingBuffer needs at least 1 slot (got {slots}), and either slot_shape (with "
                "dtype) or slot_bytes"
            )
        if slot_shape is None:
            slot_shape, dtype = (int(slot_bytes or 0),), torch.uint8
        self.producer, self.consumer = producer, consumer
        self.slots, self.slot_shape, self.dtype = slots, tuple(slot_shape), dtype
        self._slot_bytes = torch.Size(slot_shape).numel() * dtype.itemsize
        stride = -(-self._slot_bytes // 64) * 64
        ring = self._zeros((slots, stride))
        # Each end waits for a word in its own memory. The words are on separate cache lines.
        words = self._zeros((128,), on_host=True)
        self._on_gpu = heap.device.type != "cpu"
        self._filled = words.address(consumer)
        self._emptied = words.address(producer) + 64
        self._views: list[torch.Tensor] = [
            slot[: self._slot_bytes].view(dtype).view(self.slot_shape)
            for slot in ring.peer(consumer)
        ]
        self._addresses = [view.data_ptr() for view in self._views]
        self._done = 0  # the number of slots that this end has filled or emptied
        # The producer may fill slots until `_done` reaches `_fill_limit`, and the consumer may take
        # slots until `_done` reaches `_take_limit`. Then this end reads the other end's word again.
        # On all other ranks the limits stay 0.
        self._fill_limit = slots if heap.rank == producer else 0
        self._take_limit = 0
        self._waits = 0
        self._ended = False
        self._reservation = SlotBlock(self, filling=True)
        self._next = SlotBlock(self, filling=False)
        heap.barrier()

    # ---- The producer's end ----

    def reserve(self, timeout: float | None = None) -> "SlotBlock":
        """`with ring.reserve() as slot:` gives a free slot to write.

        The end of the block sends the slot. If the block raises an error, the slot is not sent.
        """
        self._reservation.timeout = timeout
        return self._reservation

    def put(self, value: torch.Tensor, timeout: float | None = None) -> None:
        """Copy a tensor into the next slot and send the slot."""
        if self._done >= self._fill_limit:
            self._find_slot("put", timeout)
        if value.shape != self.slot_shape or value.dtype is not self.dtype:
            raise UsageError(
                f"value is {value.dtype} of shape {tuple(value.shape)}, but slots are {self.dtype} "
                f"of shape {self.slot_shape}"
            )
        slot = self._done % self.slots
        if value.is_cpu and value.is_contiguous() and not self._on_gpu:
            core = self._core_holding_gil if self._slot_bytes <= 32 << 10 else self._core
            core.tutti_put_signal(
                self._addresses[slot],
                value.data_ptr(),
                self._slot_bytes,
                self._filled,
                self._done + 1,
                0,
            )
            self._done += 1
        else:
            self._views[slot].copy_(value)
            self._publish_slot()

    def try_put(self, value: torch.Tensor) -> bool:
        """Put the value if a slot is free now. Return whether the value was put."""
        if self._done >= self._fill_limit and not self._find_slot("put", wait=False):
            return False
        self.put(value)
        return True

    def finish(self) -> None:
        """End the stream. The consumer takes the remaining slots, then gets EndOfStream."""
        self._check_end("finish", self.producer)
        self._ended = True
        self._fill_limit = 0
        self._core_holding_gil.tutti_store(self._filled, self._done | _END)

    # ---- The consumer's end ----

    def next(self, timeout: float | None = None) -> "SlotBlock":
        """`with ring.next() as item:` gives a view of the oldest slot.

        The end of the block frees the slot. If the block raises an error, the slot is not freed.
        Raises EndOfStream when the producer has finished.
        """
        self._next.timeout = timeout
        return self._next

    def get(self, out: torch.Tensor | None = None, timeout: float | None = None) -> torch.Tensor:
        """Copy the oldest slot, free the slot, and return the copy."""
        if self._done >= self._take_limit:
            self._find_slot("get", timeout)
        view = self._views[self._done % self.slots]
        out = view.clone() if out is None else out.copy_(view)
        self._publish_slot()
        return out

    def try_get(self) -> torch.Tensor | None:
        """Like `get`, but return None if no slot is filled now."""
        if self._done >= self._take_limit and not self._find_slot("get", wait=False):
            return None
        return self.get()

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield views of the slots, in order, until the stream ends.

        A view is valid until the next view is requested.
        """
        while True:
            try:
                with self.next() as item:
                    yield item
            except EndOfStream:
                return

    def cancel(self) -> None:
        """End the stream as the consumer. The producer's next wait raises ConsumerGone."""
        self._check_end("cancel", self.consumer)
        self._ended = True
        self._take_limit = 0
        self._core_holding_gil.tutti_store(self._emptied, self._done | _END)

    # ---- Both ends ----

    def __len__(self) -> int:
        """Return the number of slots that are filled and not yet freed."""
        self._check_open()
        filled = self._core_holding_gil.tutti_load(self._filled) & ~_END
        return int(filled - (self._core_holding_gil.tutti_load(self._emptied) & ~_END))

    def stats(self) -> dict[str, int]:
        """Return the slots and bytes that this end has sent or freed, and the number of waits."""
        bytes = self._done * self._slot_bytes
        return {"slots": self._done, "bytes": bytes, "waits": self._waits}

    def _publish_slot(self) -> None:
        """Publish that the current slot has been filled or freed (release)."""
        if self._on_gpu:
            torch.cuda.current_stream(self.heap.device).synchronize()
        self._done += 1
        word = self._filled if self.rank == self.producer else self._emptied
        self._core_holding_gil.tutti_store(word, self._done)

    def _find_slot(self, call: str, timeout: float | None = None, wait: bool = True) -> bool:
        """Read the other end's word, and update the limit of this end.

        Return whether this end has a slot to fill or to empty. With `wait`, wait for such a slot.
        """
        filling = call == "put"
        self._check_end(call, self.producer if filling else self.consumer)
        word, peer = (self._emptied, self.consumer) if filling else (self._filled, self.producer)
        needed = self._done + 1 - (self.slots if filling else 0)
        value = int(self._core_holding_gil.tutti_load(word))  # larger than any count if _END is set
        if wait and value < needed:
            self._waits += 1
            what = f"slot {self._done} of a ring from rank {peer}"
            if filling:
                what = f"a free slot in a ring of {self.slots} slots to rank {peer}"
            value = self._await(word, needed, peer, timeout, what)
        count, ended = value & ~_END, value >= _END
        if filling and ended:
            raise ConsumerGone(
                f"rank {peer} has cancelled the ring after {count} slots. This rank has filled "
                f"{self._done} slots."
            )
        if ended and self._done >= count:
            raise EndOfStream(f"rank {peer} has finished after {self._done} slots")
        if filling:
            self._fill_limit = count + self.slots
        else:
            self._take_limit = count
        return value >= needed

    def _check_end(self, call: str, rank: int) -> None:
        self._check_open()
        if self.rank != rank:
            raise UsageError(
                f"{call} on rank {self.rank} is not possible: the producer is rank "
                f"{self.producer} and the consumer is rank {self.consumer}"
            )
        if self._ended and call in ("put", "get"):
            ended_by = "finish" if call == "put" else "cancel"
            raise UsageError(f"{call}: this rank has ended the stream with {ended_by}()")

    def _release(self) -> None:
        self._fill_limit = self._take_limit = 0


class SlotBlock:
    """A `with` block that holds a slot, and publishes the slot if the block ends without error."""

    __slots__ = ("_filling", "_ring", "timeout")

    def __init__(self, ring: RingBuffer, filling: bool) -> None:
        self._ring, self._filling = ring, filling
        self.timeout: float | None = None

    def __enter__(self) -> torch.Tensor:
        ring = self._ring
        if ring._done >= (ring._fill_limit if self._filling else ring._take_limit):
            ring._find_slot("put" if self._filling else "get", self.timeout)
        return ring._views[ring._done % ring.slots]

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is None:
            self._ring._publish_slot()
