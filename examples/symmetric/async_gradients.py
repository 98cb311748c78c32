"""Asynchronous aggregation: ranks add gradients, and owners update weights, at any time.

    tutti run -n 2 --device cpu examples/symmetric/async_gradients.py

Each rank owns some rows of a weight matrix. Ranks add gradients to a DistributedTensor, whose sums
are never reset to 0. To update its rows, an owner reads the sum and applies the difference from the
sum that it read before. With a reset, an addition between the read and the reset would be lost. New
rows are published in a ParameterCache. There is no barrier: a rank waits only if it is SLACK steps
ahead of another rank, because gradients of much older weights would slow convergence.
"""

import time

import torch

import tutti
from tutti.comm import symmetric
from tutti.structures import DistributedTensor, ParameterCache

OUTPUTS, INPUTS, STEPS, BATCH, RATE, SLACK = 12, 20, 600, 16, 0.02, 20

with tutti.init() as world, symmetric.Heap(bytes=1 << 20) as heap:
    torch.manual_seed(0)
    truth = torch.randn(OUTPUTS, INPUTS, dtype=torch.float64)
    torch.manual_seed(1 + world.rank)  # different data on every rank
    with (
        DistributedTensor(heap, (OUTPUTS, INPUTS), torch.float64) as summed,
        ParameterCache(heap, OUTPUTS, INPUTS, torch.float64) as weights,
        heap.counters(1) as contributions,  # all ranks use the counter of rank 0
    ):
        own_rows, all_rows = weights.local_indices, torch.arange(OUTPUTS)
        local = torch.zeros(len(own_rows), INPUTS, dtype=torch.float64)
        weights.publish_all(own_rows, local)
        heap.barrier()

        last_sum = torch.zeros_like(local)

        def apply_new(local: torch.Tensor, last_sum: torch.Tensor) -> None:
            """Update the rows of this rank with all gradients since its last update."""
            now = summed.local.clone()
            local -= RATE * (now - last_sum)
            last_sum.copy_(now)
            weights.publish_all(own_rows, local)

        one_row_per_owner = {weights.owner(row): row for row in range(OUTPUTS)}.values()
        for step in range(STEPS):
            for row in one_row_per_owner:  # the version of a row counts its owner's steps
                weights.wait_for(row, step - SLACK)
            current, _ = weights.lookup_many(all_rows)
            x = torch.randn(BATCH, INPUTS, dtype=torch.float64)
            error = x @ (current - truth).T / BATCH
            summed.scatter_add(all_rows, error.T @ x / world.size)
            # A rank that reads this count also sees the rows that were added before.
            contributions.fetch_add(0, at=0)
            apply_new(local, last_sum)
            if world.rank == 1 and step % 100 == 0:
                time.sleep(0.002)  # a slow rank
        counted = 0
        while counted < STEPS * world.size:  # keep updating: slower ranks still add gradients
            counted = contributions.load(0, at=0)
            apply_new(local, last_sum)
        heap.barrier()

        assert counted == STEPS * world.size, counted
        assert torch.allclose(-RATE * summed.to_full()[own_rows], local, atol=1e-12), (
            "a lost addition"
        )
        final, versions = weights.lookup_many(all_rows)
        distance = float((final - truth).norm() / truth.norm())
        assert distance < 0.05, distance
        if world.is_first:
            print(f"{counted} gradients of {world.size} ranks, none lost, no barrier in the loop")
            newest = int(versions.max())
            print(f"weights are {distance:.1e} from the true weights after {newest} versions")
        heap.barrier()
