"""A rank's batches: drawn globally, cut for this rank, on the device before the step needs them.

The way of a batch: the sampler draws a step for all ranks → this rank takes its part → `fetch`
gathers it → pinned memory → the copy stream takes it to the device → `prepare` there → the loop.
All but the last arrow happens in one thread, ahead of the loop. Where the data already lies on the
device, fetching is one gather there and no thread is needed.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch

from tutti.data.batch import Batch, Part
from tutti.data.dataset import Pair, Samples, TensorSamples
from tutti.data.errors import DataError
from tutti.data.prefetch import Prefetcher
from tutti.data.sampler import GlobalSampler, Position
from tutti.data.split import bounds, even, weighted
from tutti.data.workers import WorkerFetches

# What a loop draws from: a batch, and the event that its copy to the device is done.
_Made = tuple[Batch, torch.cuda.Event | None]
_Source = Generator[_Made, None, None] | Prefetcher[_Made]


class Loader:
    """Batches for one of `ranks` data-parallel ranks, from a position that can be saved.

    `global_batch` counts the samples of a step over all ranks. `shares` weighs the ranks; without
    them they are even. A loop over the loader runs to the end of the epoch; `stream` runs on.
    `position` counts what the loop has received, not what was fetched ahead.

    `data_on_device` keeps the whole data set there. `prefetch` is how many batches are made ahead,
    None for the default: 2, or 0 where there is nothing to wait for. `workers` are processes, for
    data sets that are heavy on Python; they draw nothing from torch's global generator.

    On CUDA the thread allocates and copies while the loop runs. A loop that captures CUDA graphs
    must capture with capture_error_mode="thread_local", or with the data on the device.
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
            raise DataError(f"rank {rank} is not one of {ranks} ranks")
        # A loader that keeps both the order and the tail is an evaluation's, which may leave a
        # rank without a sample; in training it would be a rank without a gradient.
        training = shuffle or drop_last
        if training and len(samples) < ranks:
            raise DataError(
                f"the data set has {len(samples)} samples for {ranks} ranks, each needs at least "
                f"one: use {len(samples)} ranks or fewer"
            )
        if training and global_batch < ranks:
            raise DataError(
                f"a global batch of {global_batch} leaves some of {ranks} ranks without a sample: "
                f"use a global batch of at least {ranks}"
            )
        if min(workers, prefetch or 0) < 0:
            raise DataError(f"prefetch {prefetch} and workers {workers}: neither can be negative")
        if data_on_device and workers:
            raise DataError(
                "data on the device needs no workers: leave out --workers or --data-on-device"
            )
        self.rank, self.ranks, self.workers = rank, ranks, workers
        self.device = torch.device(device)
        self.data_on_device = data_on_device
        self.samples = samples.on(self.device) if data_on_device else samples
        here = data_on_device or (isinstance(samples, TensorSamples) and self.device.type == "cpu")
        self.prefetch = (0 if here and not workers else 2) if prefetch is None else prefetch
        self.sampler = GlobalSampler(
            len(samples), global_batch, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self.position = Position()
        self._shares: tuple[float, ...] | None = None
        self._source: _Source | None = None
        self._stale = False  # the source must be opened anew, at another position or other shares
        self._copies: torch.cuda.Stream | None = None
        if self.device.type == "cuda" and not (data_on_device and self.prefetch == 0):
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
        self.set_shares(shares)

    # -- where we are -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on every rank."""
        return len(self.sampler)

    def state_dict(self) -> dict[str, int | bool]:
        """The position, fit for JSON, the same on every rank and for any number of ranks."""
        return self.sampler.state_dict(self.position)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Goes on where the state was saved; also a loop that is under way does, at its next."""
        self.position = self.sampler.position(state)
        self._stale = True

    def set_shares(self, shares: Sequence[float] | None) -> None:
        """Cuts by other shares from the very next batch on; to be called at the same step by all.

        What was fetched ahead under the old shares is thrown away and fetched anew: were it used,
        a rank that is further ahead would take samples that another takes as well.
        """
        if shares is not None and len(shares) != self.ranks:
            raise DataError(f"{len(shares)} shares for {self.ranks} ranks: give one per rank")
        if shares is not None:
            weighted(0, shares)  # says what is wrong with them, if anything
        self._shares = None if shares is None else tuple(shares)
        self._stale = True

    # -- the loop ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the current epoch."""
        return self.stream(epochs=1)

    def stream(self, epochs: int | None = None) -> Generator[Batch, None, None]:
        """Batches to the end of `epochs` epochs, the current one counted, or without end.

        One loop at a time: a new one closes the one before.
        """
        self.close()
        until = None if epochs is None else self.position.epoch + epochs
        source: _Source | None = None
        try:
            while until is None or self.position.epoch < until:
                if source is not self._source:
                    raise RuntimeError("this loop over the data was closed, or another was begun")
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

    def parts(self, epochs: int | None = None) -> Iterator[Part]:
        """As `stream`, but only which samples: for a loop that gathers inside a CUDA graph.

        Gather them with `loader.samples`, which lie on the device with `data_on_device`.
        """
        self.close()
        until = None if epochs is None else self.position.epoch + epochs
        while until is None or self.position.epoch < until:
            part = next(self._parts(self.position, None))
            self.position = part.after
            yield part

    def close(self) -> None:
        """Ends the loop that is under way, its thread and its workers. A new one may be begun."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    # -- how a batch is made ----------------------------------------------------------------------

    def _open(self, until: int | None) -> _Source:
        parts = self._parts(self.position, until)
        fetched: Iterator[tuple[Part, Pair]]
        if self.workers:
            # Here and not in the thread: processes are best forked by the thread of the loop.
            fetched = WorkerFetches(self.samples, parts, self.workers, self.sampler.order.seed)
        else:
            fetched = ((part, self._fetch(part)) for part in parts)
        made = self._made(fetched)
        if not self.prefetch:
            return made
        return Prefetcher(made, self.prefetch, name=f"tutti-data-rank{self.rank}")

    def _parts(self, at: Position, until: int | None) -> Iterator[Part]:
        while until is None or at.epoch < until:
            draw = self.sampler.draw(at)
            count = len(draw.indices)
            if self._shares is None:
                cut = even(count, self.ranks)
            else:
                cut = weighted(count, self._shares, minimum=1)
            start, stop = bounds(cut, self.rank)
            indices = torch.from_numpy(draw.indices[start:stop])
            yield Part(indices, count, draw.start, draw.after)
            at = draw.after

    def _fetch(self, part: Part) -> Pair:
        indices = part.indices
        if self.data_on_device and self.device.type == "cuda":
            indices = indices.pin_memory().to(self.device, non_blocking=True)
        elif self.data_on_device:
            indices = indices.to(self.device)
        return self.samples.fetch(indices)

    def _made(self, fetched: Iterator[tuple[Part, Pair]]) -> Generator[_Made, None, None]:
        try:
            while True:
                # On the copy stream from first to last; this also selects the device, which is the
                # thread's own: pinning from a new thread would else wake up device 0. Left before
                # the yield, since without prefetch the loop runs in this thread.
                with torch.cuda.stream(self._copies) if self._copies else nullcontext():
                    item = next(fetched, None)
                    if item is None:
                        return
                    made = self._on_device(*item)
                yield made
        finally:
            if isinstance(fetched, WorkerFetches):
                fetched.close()

    def _on_device(self, part: Part, pair: Pair) -> _Made:
        copied = None
        if self._copies:
            # The pinned memory may be let go at once: torch reuses it only after the copy.
            pair = tuple(  # type: ignore[assignment]
                t.pin_memory().to(self.device, non_blocking=True) if t.device.type == "cpu" else t
                for t in pair
            )
        else:
            pair = pair[0].to(self.device), pair[1].to(self.device)
        inputs, targets = self.samples.prepare(*pair)
        if self._copies:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copies)
        return Batch(inputs, targets, part.global_count, part.start, part.after), copied

    def _received(self, batch: Batch, copied: torch.cuda.Event | None) -> Batch:
        if copied is not None:
            # The step waits on the device for the copy, the host does not. And the memory, which
            # belongs to the copy stream, must not be used again before the step is done with it.
            step = torch.cuda.current_stream(self.device)
            step.wait_event(copied)
            for tensor in batch:
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
    prefetch: int | None = None,
    workers: int = 0,
) -> Loader:
    """A loader whose epoch has each sample exactly once over all ranks, however uneven.

    All ranks take the same number of steps, some perhaps with an empty last batch, so that models
    with collectives inside (sharded, tensor-parallel) can be evaluated too.
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
        prefetch=prefetch,
        workers=workers,
    )
