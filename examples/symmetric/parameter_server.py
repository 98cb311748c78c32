"""A parameter server beside sharded training.

    tutti run -n 3 --device cpu examples/symmetric/parameter_server.py

Rank 0 holds the dense weights of a model. The other ranks, the workers, send gradients to rank 0
through ring buffers. Rank 0 updates the weights for each gradient and publishes the new weights in
a ParameterCache, where a lookup never waits and never returns a mixture of two versions. The table
of embeddings, which is the large part of the model, is sharded over all ranks. Workers gather the
rows that a batch needs, and add gradients to these rows, while the owners of the rows do nothing.
"""

import torch

import tutti
from tutti.comm import symmetric
from tutti.structures import (
    DistributedTensor,
    EndOfStream,
    ParameterCache,
    RingBuffer,
)

ROWS, WIDTH, STEPS, BATCH = 1000, 8, 400, 32


def train(number: int) -> float:
    """Train as a worker: predict for each id whether it is in the first half. Return the loss."""
    generator = torch.Generator().manual_seed(number)
    average = 1.0
    for _ in range(STEPS):
        ids = torch.randint(ROWS, (BATCH,), generator=generator)
        labels = (ids < ROWS // 2).float()
        embedded = table.gather(ids).requires_grad_()
        weights = weights_of_server.lookup(0).requires_grad_()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(embedded @ weights, labels)
        loss.backward()
        assert embedded.grad is not None and weights.grad is not None
        table.scatter_add(ids, -20.0 * embedded.grad)
        gradients[number].put(weights.grad)
        average += (float(loss.detach()) - average) / 20
    gradients[number].finish()
    return average


def serve() -> int:
    """Apply gradients in the order of arrival, as the server. Return the number of gradients."""
    weights = torch.ones(WIDTH)
    weights_of_server.publish(0, weights)
    working = set(gradients)
    applied = 0
    while working:
        for number in sorted(working):
            try:
                gradient = gradients[number].try_get()
            except EndOfStream:
                working.remove(number)
                continue
            if gradient is not None:
                weights -= 0.1 * gradient
                weights_of_server.publish(0, weights)
                applied += 1
    return applied


with tutti.init() as world, symmetric.Heap(bytes=4 << 20) as heap:
    if world.size < 2:
        raise tutti.UsageError("this example needs a server and a worker: start at least 2 ranks")
    workers = range(1, world.size)
    with (
        DistributedTensor(heap, (ROWS, WIDTH), placement="cyclic") as table,
        ParameterCache(heap, 1, WIDTH) as weights_of_server,
    ):
        gradients = {n: RingBuffer(heap, n, 0, slots=4, slot_shape=(WIDTH,)) for n in workers}
        torch.manual_seed(world.rank)
        table.local.normal_(std=0.1)
        heap.barrier()
        if world.rank == 0:
            applied = serve()
            assert applied == STEPS * len(workers), applied
            print(f"server: {applied} gradients of {len(workers)} workers, no barrier in between")
        else:
            weights_of_server.wait_for(0, 1)
            loss = train(world.rank)
            assert loss < 0.35, loss
            print(f"worker {world.rank}: loss {loss:.3f} (guessing gives 0.693)")
        for ring in gradients.values():
            ring.close()
