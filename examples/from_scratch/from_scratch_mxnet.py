"""Data parallelism from first principles, in MXNet 1.9.1: one process, several devices.

The same functions in the same order as from_scratch_torch.py, so that the two can be read side by
side. The comments here say only what MXNet does differently.

    .venv-mxnet/bin/python examples/from_scratch/from_scratch_mxnet.py --devices 2 --batch 256
"""

import time

import mxnet as mx
import numpy as np
from lesson import CLASSES, Epoch, Images, batches, first_params, flags
from mxnet import autograd, nd
from mxnet.context import Context
from mxnet.ndarray import NDArray


# MXNet's operators want to be told sizes that PyTorch reads off the weights.
def lenet(x: NDArray, params: list[NDArray]) -> NDArray:
    """Images (n, 1, 28, 28) → logits (n, 10)."""
    conv1, bias1, conv2, bias2, hidden, bias3, head, bias4 = params
    pooling = {"kernel": (2, 2), "stride": (2, 2), "pool_type": "avg"}
    x = nd.Convolution(x, conv1, bias1, kernel=(5, 5), num_filter=20)
    x = nd.Pooling(nd.relu(x), **pooling)
    x = nd.Convolution(x, conv2, bias2, kernel=(5, 5), num_filter=50)
    x = nd.Pooling(nd.relu(x), **pooling)
    x = nd.relu(nd.FullyConnected(x, hidden, bias3, num_hidden=128))
    return nd.FullyConnected(x, head, bias4, num_hidden=CLASSES)


# mx.cpu(0) and mx.cpu(1) are the same cores and the same memory, but two contexts: MXNet refuses to
# mix their arrays by accident, exactly as it would with two GPUs. So replicas on a CPU also check
# that every copy between devices is written down.
def get_devices(num_devices: int) -> list[Context]:
    gpus = mx.context.num_gpus()
    if gpus == 0:
        return [mx.cpu(i) for i in range(num_devices)]
    return [mx.gpu(i % gpus) for i in range(num_devices)]


def get_params(params: list[NDArray], device: Context) -> list[NDArray]:
    """A copy of the parameters on a device, each with a gradient that starts at zero."""
    copies = [p.copyto(device) for p in params]
    for p in copies:
        # By default MXNet overwrites a gradient in each backward pass. "add" makes it add, as
        # PyTorch does, so that a device without samples is handled alike in both files.
        p.attach_grad(grad_req="add")
    return copies


def allreduce(tensors: list[NDArray]) -> None:
    """One tensor per device, in place: afterwards each holds the sum of all."""
    total, *others = tensors
    for tensor in others:
        total += tensor.as_in_context(total.context)
    for tensor in others:
        total.copyto(tensor)


def allreduce_grouped(groups: list[list[NDArray]]) -> None:
    """One list of tensors per device: like `allreduce` for each position, but in one go."""
    buffers = [nd.concat(*[tensor.reshape(-1) for tensor in group], dim=0) for group in groups]
    allreduce(buffers)
    for buffer, group in zip(buffers, groups, strict=True):
        start = 0
        for tensor in group:
            part = buffer[start : start + tensor.size]
            part.reshape(tensor.shape).copyto(tensor)
            start += tensor.size


def split_batch(x: NDArray, y: NDArray, devices: list[Context]) -> list[tuple[NDArray, NDArray]]:
    """Consecutive parts of a batch: the first on the first device, and so on."""
    # nd.split wants equal parts, so the bounds are computed here. MXNet also knows no empty arrays
    # (a dim of 0 means "unknown"), so a device without samples must not get a part at all.
    used = devices[: len(x)]
    share, rest = divmod(len(x), len(used))
    parts = []
    start = 0
    for i, device in enumerate(used):
        stop = start + share + (i < rest)
        parts.append((x[start:stop].as_in_context(device), y[start:stop].as_in_context(device)))
        start = stop
    return parts


def train_batch(
    x: NDArray,
    y: NDArray,
    device_params: list[list[NDArray]],
    devices: list[Context],
    lr: float,
    naive: bool = False,
) -> NDArray:
    """One step of SGD on all devices. Returns the mean loss of the batch, on the first device."""
    parts = split_batch(x, y, devices)
    with autograd.record():  # MXNet records for backward only where it is asked to
        losses = [
            -nd.pick(nd.log_softmax(lenet(part_x, params)), part_y).sum() / len(x)
            for (part_x, part_y), params in zip(parts, device_params, strict=False)
        ]
    # MXNet only queues work, on CPUs too, and runs in parallel what does not depend on each other:
    # this loop does not wait for one device before it starts the next.
    for loss in losses:
        loss.backward()

    grads = [[p.grad for p in params] for params in device_params]
    if naive:
        for same_parameter in zip(*grads, strict=True):
            allreduce(list(same_parameter))
    else:
        allreduce_grouped(grads)

    for params in device_params:
        for p in params:
            p -= lr * p.grad
            p.grad[:] = 0
    total = losses[0].copy()
    for loss in losses[1:]:
        total += loss.as_in_context(total.context)
    return total


def count_correct(
    x: NDArray, y: NDArray, device_params: list[list[NDArray]], devices: list[Context]
) -> int:
    """Right answers in a batch: counts, unlike means, can be added over devices as they are."""
    parts = split_batch(x, y, devices)
    return sum(
        int((lenet(part_x, params).argmax(axis=1) == part_y).sum().asscalar())
        for (part_x, part_y), params in zip(parts, device_params, strict=False)
    )


def train(
    num_devices: int,
    batch_size: int,
    lr: float,
    epochs: int,
    images: Images,
    dtype: str = "float32",
    seed: int = 0,
    naive: bool = False,
) -> tuple[list[NDArray], list[Epoch]]:
    """Train LeNet; returns the parameters of the first device and what each epoch gave."""
    devices = get_devices(num_devices)
    print(f"{images.source}; devices: {', '.join(map(str, devices))}; dtype: {dtype}")
    if devices[0].device_type == "cpu" or len(set(devices)) < num_devices:
        print("replicas share a device: this shows that the result is right, not that it is fast")
    params = [nd.array(p, dtype=dtype) for p in first_params(seed)]
    device_params = [get_params(params, device) for device in devices]
    x, y, test_x, test_y = (nd.array(part, dtype=dtype) for part in images[:4])

    rng = np.random.default_rng(seed)
    history = []
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        loss_sum = nd.zeros(1, ctx=devices[0], dtype=dtype)
        for rows in batches(len(x), batch_size, rng):
            loss = train_batch(x[rows], y[rows], device_params, devices, lr, naive)
            loss_sum += loss * len(rows)
        mean_loss = loss_sum.asscalar() / len(x)  # waits for everything that was queued
        seconds = time.perf_counter() - start
        correct = sum(
            count_correct(
                test_x[i : i + batch_size], test_y[i : i + batch_size], device_params, devices
            )
            for i in range(0, len(test_x), batch_size)
        )
        history.append(Epoch(float(mean_loss), correct / len(test_x), seconds))
        print(history[-1].line(epoch), flush=True)
    return device_params[0], history


if __name__ == "__main__":
    args = flags("Data parallelism from first principles, in MXNet.")
    train(args.devices, args.batch, args.lr, args.epochs, args.images, naive=args.naive)
