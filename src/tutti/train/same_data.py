"""The same data on every rank: a seed for the user's dataset function, and a check over ranks.

Every rank makes the dataset itself. If a random split or a random tensor differed between ranks,
the ranks would train on samples of different datasets, without any error.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tutti.data import DataError
from tutti.data.dataset import Dataset, Samples
from tutti.data.nested import Nested, tensors_of
from tutti.world.errors import UsageError
from tutti.world.exchange import check_same, hash_tensor
from tutti.world.world import World

_COMPARED_SAMPLES = 8


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python; on exit, restore their states."""
    states = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(states[0])
            random.setstate(states[1])


def check_same_dataset(world: World, dataset: Dataset, seed: int) -> None:
    """Raise RanksDiffer unless all ranks have the same dataset. All ranks must call this."""
    described = describe_samples(dataset.train, "training", seed)
    check_same(world, dataset=described | describe_samples(dataset.test, "test", seed))


def check_same_samples(world: World, samples: Samples, seed: int) -> None:
    """Raise RanksDiffer unless all ranks have the same samples. All ranks must call this."""
    check_same(world, dataset=describe_samples(samples, "its", seed))


def describe_samples(samples: Samples, kind: str, seed: int) -> dict[str, int]:
    """Return the number of samples, and hashes of the inputs and targets of a few samples.

    The samples are fetched twice with the same seeds. If the two inputs of a sample differ, a
    transform uses its own random number generator. Then inputs cannot be compared between ranks and
    are left out.
    """
    described = {f"{kind} samples": len(samples)}
    count = min(_COMPARED_SAMPLES, len(samples))
    indices = torch.linspace(0, len(samples) - 1, count, dtype=torch.float64).long()
    hashes = []
    try:
        for _ in range(2 if count else 0):
            with seeded_generators(seed):
                hashes.append([_hash(part) for part in samples.batch(indices)])
    except DataError as error:
        raise UsageError(str(error)) from None
    if hashes:
        described[f"{kind} targets"] = hashes[0][1]
        if hashes[0][0] == hashes[1][0]:
            described[f"{kind} inputs"] = hashes[0][0]
    return described


def _hash(value: Nested) -> int:
    hashes = [hash_tensor(tensor) for tensor in tensors_of(value)]
    # The hash of a tuple of ints is the same in every Python process.
    return hashes[0] if len(hashes) == 1 else hash(tuple(hashes))
