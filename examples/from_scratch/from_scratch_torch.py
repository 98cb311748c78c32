"""Data parallelism from first principles, in PyTorch: one process, several devices.

Every device holds a copy of the parameters and gets a part of each batch. The gradients are summed
over the devices, and every device makes the same update, so the copies stay equal. This file uses
neither torch.distributed nor torch.optim.

    python examples/from_scratch/from_scratch_torch.py --devices 2 --batch 256 --epochs 3 --lr 0.1
"""

import time

import numpy as np
import torch
import torch.nn.functional as F
from lesson import Epoch, Images, batches, first_params, flags
from torch import Tensor


# The model is a function of its input and a list of parameters, not an object that owns its
# parameters. So the same function runs with any copy of the parameters, on any device.
def lenet(x: Tensor, params: list[Tensor]) -> Tensor:
    """Return the logits (n, 10) of images (n, 1, 28, 28)."""
    conv1, bias1, conv2, bias2, hidden, bias3, head, bias4 = params
    x = F.avg_pool2d(F.relu(F.conv2d(x, conv1, bias1)), 2)
    x = F.avg_pool2d(F.relu(F.conv2d(x, conv2, bias2)), 2)
    x = F.relu(F.linear(x.flatten(1), hidden, bias3))
    return F.linear(x, head, bias4)


# If there are fewer GPUs than devices, several entries of the list are the same device. Each entry
# still has its own copy of the parameters and its own part of the batch. Such replicas show that
# the sums are right, but they are not faster.
def get_devices(num_devices: int) -> list[torch.device]:
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return [torch.device("cpu")] * num_devices
    return [torch.device("cuda", i % gpus) for i in range(num_devices)]


def get_params(params: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return a copy of the parameters on a device. The gradient of each parameter is zero."""
    # Without copy=True, `to` would return the same tensor if it is already on the device, and two
    # replicas on one device would share their parameters.
    copies = [p.detach().to(device, copy=True).requires_grad_() for p in params]
    for p in copies:
        p.grad = torch.zeros_like(p)
    return copies


def allreduce(tensors: list[Tensor]) -> None:
    """Replace each tensor by the sum of all tensors, in place. There is one tensor per device."""
    # This is the naive algorithm: all tensors are sent to the first device, and the sum is sent
    # back. The first device receives and sends k − 1 tensors for k devices, while the links between
    # the other devices are idle. A ring all-reduce would use all links.
    total, *others = tensors
    for tensor in others:
        total += tensor.to(total.device)
    for tensor in others:
        tensor.copy_(total)


def allreduce_grouped(groups: list[list[Tensor]]) -> None:
    """All-reduce the tensors at each position of the groups, with one call of `allreduce`.

    There is one group (a list of tensors) per device.
    """
    # Each transfer has a fixed cost, and LeNet has four biases of a few hundred bytes. With one
    # long buffer, this cost occurs once instead of once per tensor.
    buffers = [torch.cat([tensor.flatten() for tensor in group]) for group in groups]
    allreduce(buffers)
    for buffer, group in zip(buffers, groups, strict=True):
        parts = buffer.split([tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def split_batch(x: Tensor, y: Tensor, devices: list[torch.device]) -> list[tuple[Tensor, Tensor]]:
    """Return consecutive parts of a batch: the first part on the first device, and so on."""
    # If k devices do not divide the batch evenly, the first len(x) % k devices get one sample more.
    # If there are fewer samples than devices, the last devices get no part.
    used = devices[: len(x)]
    parts = zip(x.tensor_split(len(used)), y.tensor_split(len(used)), used, strict=True)
    return [(part_x.to(device), part_y.to(device)) for part_x, part_y, device in parts]


def train_batch(
    x: Tensor,
    y: Tensor,
    device_params: list[list[Tensor]],
    devices: list[torch.device],
    lr: float,
    naive: bool = False,
) -> Tensor:
    """Run one step of SGD on all devices. Return the batch's mean loss, on the first device."""
    # Each device sums its losses and divides by the size of the WHOLE batch. The sum over devices
    # is then the mean over samples, for any split. A mean on each device would be wrong twice: the
    # sum would be k times too large, and after an uneven split samples would have unequal weights.
    parts = split_batch(x, y, devices)
    losses = [
        F.cross_entropy(lenet(part_x, params), part_y, reduction="sum") / len(x)
        for (part_x, part_y), params in zip(parts, device_params, strict=False)
    ]
    # GPUs run asynchronously, so the forward passes above overlap. With one call for all losses,
    # the backward passes overlap too, because autograd has a thread for each GPU.
    torch.autograd.backward(losses)

    grads = [[p.grad for p in params] for params in device_params]
    if naive:
        for same_parameter in zip(*grads, strict=True):
            allreduce(list(same_parameter))
    else:
        allreduce_grouped(grads)

    # All devices have equal parameters and equal gradients. So they make the same update, and no
    # parameter has to be sent. Then the gradients are set to zero, because backward adds to them,
    # and because a device without samples in the next batch must contribute zero.
    with torch.no_grad():
        for params in device_params:
            for p in params:
                p -= lr * p.grad
                p.grad.zero_()
        return torch.stack([loss.to(devices[0]) for loss in losses]).sum()


@torch.no_grad()
def count_correct(
    x: Tensor, y: Tensor, device_params: list[list[Tensor]], devices: list[torch.device]
) -> int:
    """Return the number of correct predictions in a batch, summed over devices."""
    parts = split_batch(x, y, devices)
    return sum(
        int((lenet(part_x, params).argmax(1) == part_y).sum())
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
) -> tuple[list[Tensor], list[Epoch]]:
    """Train LeNet. Return the parameters of the first device and the results of each epoch."""
    # `batch_size` counts samples over all devices. So the learning rate does not depend on the
    # number of devices, and the losses of runs with 1, 2 or 4 devices can be compared.
    devices = get_devices(num_devices)
    print(f"{images.source}; devices: {', '.join(map(str, devices))}; dtype: {dtype}")
    if len(set(devices)) < num_devices:
        print("replicas share a device: this shows that the result is right, not that it is fast")
    number = getattr(torch, dtype)
    params = [torch.tensor(p, dtype=number) for p in first_params(seed)]
    device_params = [get_params(params, device) for device in devices]
    x, test_x = (torch.tensor(part, dtype=number) for part in (images.train_x, images.test_x))
    y, test_y = (torch.tensor(part) for part in (images.train_y, images.test_y))

    rng = np.random.default_rng(seed)
    history = []
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        loss_sum = torch.zeros((), dtype=number, device=devices[0])
        for rows in batches(len(x), batch_size, rng):
            loss = train_batch(x[rows], y[rows], device_params, devices, lr, naive)
            loss_sum += loss * len(rows)
        # The host reads the loss only once per epoch, because reading it in each step would make
        # the host wait for the devices. After this read, all queued work is done, so the measured
        # time includes it.
        mean_loss = loss_sum.item() / len(x)
        seconds = time.perf_counter() - start
        correct = sum(
            count_correct(
                test_x[i : i + batch_size], test_y[i : i + batch_size], device_params, devices
            )
            for i in range(0, len(test_x), batch_size)
        )
        history.append(Epoch(mean_loss, correct / len(test_x), seconds))
        print(history[-1].line(epoch), flush=True)
    return device_params[0], history


if __name__ == "__main__":
    args = flags("Data parallelism from first principles, in PyTorch.")
    train(args.devices, args.batch, args.lr, args.epochs, args.images, naive=args.naive)
