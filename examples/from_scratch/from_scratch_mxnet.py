"""Data parallelism from first principles, in MXNet 1.9.1: one process, several devices.

This file has the same functions in the same order as from_scratch_torch.py, so that both files can
be read side by side. The comments here explain only what MXNet does differently.

    .venv-mxnet/bin/python examples/from_scratch/from_scratch_mxnet.py --devices 2 --batch 256
"""

import time

import mxnet as mx
import numpy as np
from lesson import CLASSES, Epoch, Images, batches, first_params, flags
from mxnet import autograd, nd
from mxnet.context import Context
from mxnet.ndarray import NDArray


# MXNet's operators need sizes as arguments that PyTorch reads from the shapes of the weights.
def lenet(x: NDArray, params: list[NDArray]) -> NDArray:
    """Return the logits (n, 10) of images (n, 1, 28, 28)."""
    conv1, bias1, conv2, bias2, hidden, bias3, head, bias4 = params
    pooling = {"kernel": (2, 2), "stride": (2, 2), "pool_type": "avg"}
    x = nd.Convolution(x, conv1, bias1, kernel=(5, 5), num_filter=20)
    x = nd.Pooling(nd.relu(x), **pooling)
    x = nd.Convolution(x, conv2, bias2, kernel=(5, 5), num_filter=50)
    x = nd.Pooling(nd.relu(x), **pooling)
    x = nd.relu(nd.FullyConnected(x, hidden, bias3, num_hidden=128))
    return nd.FullyConnected(x, head, bias4, num_hidden=CLASSES)


# mx.cpu(0) and mx.cpu(1) are the same cores and the same memory, but two contexts. As with two
# GPUs, MXNet refuses operations on arrays of different contexts. So a run on a CPU also shows that
# no copy between devices is missing.
def get_devices(num_devices: int) -> list[Context]:
    gpus = mx.context.num_gpus()
    if gpus == 0:
        return [mx.cpu(i) for i in range(num_devices)]
    return [mx.gpu(i % gpus) for i in range(num_devices)]


def get_params(params: list[NDArray], device: Context) -> list[NDArray]:
    """Return a copy of the parameters on a device. The gradient of each parameter is zero."""
    copies = [p.copyto(device) for p in params]
    for p in copies:
        # By default, a backward pass of MXNet overwrites gradients. With "add" it adds to them, as
        # in PyTorch, so that both files handle a device without samples in the same way.
        p.attach_grad(grad_req="add")
    return copies


def allreduce(tensors: list[NDArray]) -> None:
    """Replace each tensor by the sum of all tensors, in place. There is one tensor per device."""
    total, *others = tensors
    for tensor in others:
        total += tensor.as_in_context(total.context)
    for tensor in others:
        total.copyto(tensor)


def allreduce_grouped(groups: list[list[NDArray]]) -> None:
    """All-reduce the tensors at each position of the groups, with one call of `allreduce`.

    There is one group (a list of tensors) per device.
    """
    buffers = [nd.concat(*[tensor.reshape(-1) for tensor in group], dim=0) for group in groups]
    allreduce(buffers)
    for buffer, group in zip(buffers, groups, strict=True):
        start = 0
        for tensor in group:
            part = buffer[start : start + tensor.size]
            part.reshape(tensor.shape).copyto(tensor)
            start += tensor.size


def split_batch(x: NDArray, y: NDArray, devices: list[Context]) -> list[tuple[NDArray, NDArray]]:
    """Return consecutive parts of a batch: the first part on the first device, and so on."""
    # nd.split supports only equal parts, so the bounds are computed here. MXNet has no empty arrays
    # (a dim of 0 means "unknown"), so a device without samples gets no part.
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
    """Run one step of SGD on all devices. Return the batch's mean loss, on the first device."""
    parts = split_batch(x, y, devices)
    with autograd.record():  # MXNet records operations for backward only inside this context
        losses = [
            -nd.pick(nd.log_softmax(lenet(part_x, params)), part_y).sum() / len(x)
            for (part_x, part_y), params in zip(parts, device_params, strict=False)
        ]
    # MXNet queues operations, on CPUs too, and runs independent operations in parallel. So this
    # loop does not wait for a device before it starts the next device.
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
    """Return the number of correct predictions in a batch, summed over devices."""
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
    """Train LeNet. Return the parameters of the first device and the results of each epoch."""
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
        mean_loss = loss_sum.asscalar() / len(x)  # waits for all queued operations
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
