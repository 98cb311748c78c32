"""Each rank's batches: drawn globally, divided among ranks, copied to the device before the step.

The path of a batch: GlobalSampler draws the samples of a step for all ranks → this rank takes its
indices → `fetch` gathers the samples → pinned memory → a CUDA stream copies them to the device →
`prepare` converts them there → the training loop. A thread does this work ahead of the loop.
"""

import ctypes
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as MapDataset

from tutti.data import DataError
from tutti.data.dataset import Pair, Samples, TensorSamples
from tutti.data.nested import Nested, count_rows, map_tensors, tensors_of
from tutti.data.sampler import GlobalSampler, Position
from tutti.data.split import bounds, even, weighted

_PR_SET_PDEATHSIG = 1
_LOOP_CLOSED = "this loop over the data was closed, or another loop was started"


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's samples of a step; `inputs, targets = batch` unpacks it.

    In the short last batch of an epoch, a rank may get no sample. Then the tensors have length 0,
    and the rank must still take part in the step's collectives.
    """

    inputs: Nested
    targets: Nested
    global_count: int  # number of samples of the step on all ranks; the loss is divided by it
    start: Position
    after: Position

    def __iter__(self) -> Iterator[Nested]:
        yield self.inputs
        yield self.targets

    @property
    def count(self) -> int:
        """The number of samples of this step on this rank."""
        return count_rows(self.inputs)


@dataclass(frozen=True, slots=True)
class BatchIndices:
    """The indices of one rank's samples of a step, before the samples are fetched."""

    indices: Tensor
    global_count: int
    start: Position
    after: Position


# A batch, and the CUDA event after its copy to the device.
_CopiedBatch = tuple[Batch, torch.cuda.Event | None]
_Fetched = Generator[tuple[BatchIndices, Pair], None, None]


class Loader:
    """Batches for one of `ranks` data-parallel ranks, from a position that can be saved.

    `global_batch` counts the samples of a step over all ranks. A rank's number of samples is
    proportional to its value in `shares`; without `shares` all ranks take the same number.
    Iterating over a Loader ends at the end of the epoch; `stream` continues with the next epochs.
    `position` is the data position after the last batch that the loop has received; prefetched
    batches do not count.

    `data_on_device` stores the whole dataset on the device. `prefetch` is the number of batches to
    prepare ahead; by default 2, or 0 if the samples are tensors on the same device. `workers` is
    the number of processes that fetch samples, for datasets that spend much time in Python.

    On CUDA the prefetch thread allocates memory while the loop runs. A loop that captures CUDA
    graphs must use capture_error_mode="thread_local" or `data_on_device`.
    """

    def __init__(
        self,
        samples: Samples,
        global_batch: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        shares: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
        data_on_device: bool = False,
        prefetch: int | None = None,
        workers: int = 0,
    ) -> None:
        if not 0 <= rank < ranks:
            raise DataError(f"rank must be 0 to {ranks - 1} for {ranks} ranks, got {rank}")
        # Only evaluation uses neither shuffle nor drop_last. In evaluation a rank may have no
        # sample; in training such a rank would have no gradient.
        training = shuffle or drop_last
        if training and len(samples) < ranks:
            raise DataError(
                f"the dataset has {len(samples)} samples for {ranks} ranks, but each rank needs at "
                f"least one: use at most {len(samples)} ranks"
            )
        if training and global_batch < ranks:
            raise DataError(
                f"the global batch must be at least {ranks}, the number of ranks, got "
                f"{global_batch}"
            )
        for flag, value in (("--workers", workers), ("--prefetch", prefetch or 0)):
            if value < 0:
                raise DataError(f"{flag} must be at least 0, got {value}")
        if data_on_device and workers:
            raise DataError(
                f"--workers {workers} has no effect with --data-on-device: leave out one of the "
                "flags"
            )
        self.rank, self.ranks, self.workers = rank, ranks, workers
        self.device = torch.device(device)
        self.data_on_device = data_on_device
        self.samples = samples.to(self.device) if data_on_device else samples
        local = data_on_device or (isinstance(samples, TensorSamples) and self.device.type == "cpu")
        self.prefetch = (0 if local and not workers else 2) if prefetch is None else prefetch
        self.sampler = GlobalSampler(
            len(samples), global_batch, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self.position = Position()
        self._shares: tuple[float, ...] | None = None
        self._source: _BatchSource | None = None
        self._stale = False  # position or shares changed: discard the prefetched batches
        self._copy_stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda" and not (data_on_device and self.prefetch == 0):
            self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        self.set_shares(shares)

    def __len__(self) -> int:
        """Return the number of steps in a whole epoch. It is the same on every rank."""
        return len(self.sampler)

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position as JSON values, which do not depend on rank or number of ranks."""
        return self.sampler.state_dict(self.position)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a saved position; a running loop continues there with its next batch."""
        self.position = self.sampler.position(state)
        self._stale = True

    def set_shares(self, shares: Sequence[float] | None) -> None:
        """Use other shares from the next batch on. All ranks must call this at the same step.

        Batches prefetched with the old shares are discarded and fetched again. Otherwise, two ranks
        could train on the same samples.
        """
        if shares is not None:
            if len(shares) != self.ranks:
                raise DataError(
                    f"got {len(shares)} shares for {self.ranks} ranks: give one per rank"
                )
            weighted(0, shares)  # raises DataError for shares that are not finite and positive
        self._shares = None if shares is None else tuple(shares)
        self._stale = True

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from `position` to the end of the current epoch."""
        return self.stream(epochs=1)

    def stream(self, epochs: int | None = None) -> Generator[Batch, None, None]:
        """Yield the batches of `epochs` epochs, including the current epoch. None: without end.

        Starting a loop closes the previous loop.
        """
        self.close()
        until = None if epochs is None else self.position.epoch + epochs
        source = None
        try:
            while until is None or self.position.epoch < until:
                if source is not self._source:
                    raise RuntimeError(_LOOP_CLOSED)
                if source is None or self._stale:
                    self.close()
                    source = self._source = self._open(until)
                    self._stale = False
                batch, copied = next(source)
                self.position = batch.after
                yield self._received(batch, copied)
        finally:
            if source is self._source:
                self.close()

    def indices(self, epochs: int | None = None) -> Iterator[BatchIndices]:
        """Like `stream`, but yields only indices into `samples`, for a loop with a CUDA graph."""
        self.close()
        until = None if epochs is None else self.position.epoch + epochs
        while until is None or self.position.epoch < until:
            drawn = next(self._draw(self.position, None))
            self.position = drawn.after
            yield drawn

    def close(self) -> None:
        """End the running loop, its thread and its workers. A new loop may be started."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _open(self, until: int | None) -> "_BatchSource":
        drawn = self._draw(self.position, until)
        if self.workers:
            seed = self.sampler.order.seed
            fetched = _fetch_in_workers(self.samples, drawn, self.workers, seed)
        else:
            fetched = ((indices, self._fetch(indices)) for indices in drawn)
        batches = self._batches(fetched)
        if not self.prefetch:
            return batches
        return Prefetcher(batches, self.prefetch, name=f"tutti-data-rank{self.rank}")

    def _draw(self, at: Position, until: int | None) -> Iterator[BatchIndices]:
        while until is None or at.epoch < until:
            draw, shares = self.sampler.draw(at), self._shares
            count = len(draw.indices)
            counts = weighted(count, shares, minimum=1) if shares else even(count, self.ranks)
            indices = torch.from_numpy(draw.indices[slice(*bounds(counts, self.rank))])
            yield BatchIndices(indices, count, draw.start, draw.after)
            at = draw.after

    def _fetch(self, drawn: BatchIndices) -> Pair:
        indices = drawn.indices
        if self.data_on_device and self.device.type == "cuda":
            indices = indices.pin_memory().to(self.device, non_blocking=True)
        elif self.data_on_device:
            indices = indices.to(self.device)
        return self.samples.fetch(indices)

    def _batches(self, fetched: _Fetched) -> Generator[_CopiedBatch, None, None]:
        try:
            while True:
                # The stream context also selects the device, which is a property of the thread:
                # pinning from a new thread would otherwise initialise device 0. The context ends
                # before the yield, because without prefetch the training loop runs in this thread.
                with torch.cuda.stream(self._copy_stream) if self._copy_stream else nullcontext():
                    item = next(fetched, None)
                    if item is None:
                        return
                    batch = self._to_device(*item)
                yield batch
        finally:
            fetched.close()

    def _to_device(self, drawn: BatchIndices, pair: Pair) -> _CopiedBatch:
        copied = None
        if self._copy_stream:
            # The pinned memory may be freed at once: torch reuses it only after the copy.
            pair = map_tensors(
                lambda t: (
                    t.pin_memory().to(self.device, non_blocking=True)
                    if t.device.type == "cpu"
                    else t
                ),
                pair,
            )
        pair = map_tensors(lambda t: t.to(self.device), pair)
        inputs, targets = self.samples.prepare(*pair)
        if self._copy_stream:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copy_stream)
        return Batch(inputs, targets, drawn.global_count, drawn.start, drawn.after), copied

    def _received(self, batch: Batch, copied: torch.cuda.Event | None) -> Batch:
        """Make `batch` safe to read on the step's stream. `tutti profile` counts samples here."""
        if copied is not None:
            # The device waits for the copy, not the host. record_stream keeps the allocator from
            # reusing the memory, which belongs to the copy stream, before the step has read it.
            step = torch.cuda.current_stream(self.device)
            step.wait_event(copied)
            for tensor in tensors_of((batch.inputs, batch.targets)):
                tensor.record_stream(step)
        return batch


def evaluation_loader(
    samples: Samples,
    rank_batch: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    device: torch.device | str = "cpu",
    data_on_device: bool = False,
    workers: int = 0,
) -> Loader:
    """Return a loader whose epoch has each sample exactly once over all ranks.

    The number of samples need not be a multiple of the batch. All ranks take the same number of
    steps, because forward may contain collectives. The last batch of a rank may be empty.
    """
    return Loader(
        samples,
        rank_batch * ranks,
        rank=rank,
        ranks=ranks,
        shuffle=False,
        drop_last=False,
        device=device,
        data_on_device=data_on_device,
        workers=workers,
    )


Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over a generator that runs in a thread, at most `depth` items ahead of the loop.

    An exception in the thread is raised in the loop in place of the next item, with the thread's
    traceback. The thread holds no reference to the loop, so an abandoned loop is garbage-collected
    and then closes the thread.
    """

    def __init__(self, items: Generator[Item, None, None], depth: int, name: str) -> None:
        self._ready: SimpleQueue[Future[Item]] = SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._closed = False
        # A daemon thread, because a process that exits inside a loop must not wait for data.
        self._thread = threading.Thread(target=self._work, args=(items,), name=name, daemon=True)
        self._thread.start()

    def _work(self, items: Generator[Item, None, None]) -> None:
        ended = False
        while not ended and self._free.acquire():
            result: Future[Item] = Future()
            try:
                if self._closed:
                    raise RuntimeError(_LOOP_CLOSED)
                result.set_result(next(items))
            except BaseException as error:  # also StopIteration, which ends the loop
                result.set_exception(error)
                ended = True
            self._ready.put(result)
        items.close()  # the `finally` of the generator must run in the thread that ran it

    def __next__(self) -> Item:
        if self._closed:
            raise RuntimeError(_LOOP_CLOSED)
        result = self._ready.get()
        if result.exception() is not None:
            self._ready.put(result)  # a later call raises the exception again
        self._free.release()
        return result.result()

    def close(self) -> None:
        """End the thread after its current item, and wait until it has ended."""
        self._closed = True
        self._free.release()
        self._thread.join()


def _fetch_in_workers(
    samples: Samples, drawn: Iterator[BatchIndices], workers: int, seed: int
) -> _Fetched:
    """Yield samples fetched by processes of torch's DataLoader, in the order of `drawn`."""
    requested: deque[BatchIndices] = deque()

    def requests() -> Iterator[list[int]]:
        for batch in drawn:
            requested.append(batch)
            yield batch.indices.tolist()

    loader = DataLoader(
        _BatchFetch(samples),
        batch_sampler=requests(),
        num_workers=workers,
        collate_fn=tuple,
        worker_init_fn=_leave_process_group,
        # Without this argument DataLoader would draw the workers' seed from torch's global
        # generator, and a resumed run would differ from an uninterrupted run.
        generator=torch.Generator().manual_seed(seed),
    )
    # The worker processes start here: forking is safest from the loop's thread.
    pairs: Any = iter(loader)

    def fetched() -> _Fetched:
        try:
            for inputs, targets in pairs:
                yield requested.popleft(), (inputs, targets)
        finally:
            # Stop the workers explicitly: the frames of an exception may keep `pairs` alive.
            pairs._shutdown_workers()

    return fetched()


def _leave_process_group(worker: int) -> None:
    """Move this worker process to its own process group.

    Signals to the rank (from Ctrl-C or a scheduler) then do not reach the worker, which the rank
    still needs until it has saved a checkpoint. The kernel kills a worker when its rank ends.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _BatchFetch(MapDataset[Any]):
    """Lets torch's DataLoader read Samples. `__getitems__` fetches a whole batch."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitems__(self, indices: list[int]) -> Pair:
        return self.samples.fetch(torch.tensor(indices, dtype=torch.int64))


_BatchSource = Generator[_CopiedBatch, None, None] | Prefetcher[_CopiedBatch]
