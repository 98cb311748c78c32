"""Data parallelism from first principles, in PyTorch: one process, several devices.

Every device holds a copy of the parameters and sees a part of each batch. The gradients are summed
over the devices, every copy takes the same step, and so the copies stay equal. Nothing else is
needed, and nothing here comes from torch.distributed or torch.optim.

    python examples/from_scratch/from_scratch_torch.py --devices 2 --batch 256 --epochs 3 --lr 0.1
"""

import time

import numpy as np
import torch
import torch.nn.functional as F
from lesson import Epoch, Images, batches, first_params, flags
from torch import Tensor


# The model is a function of its input and a list of parameters, not an object that owns them: the
# same function then runs on any copy of the parameters, wherever that copy lives.
def lenet(x: Tensor, params: list[Tensor]) -> Tensor:
    """Images (n, 1, 28, 28) → logits (n, 10)."""
    conv1, bias1, conv2, bias2, hidden, bias3, head, bias4 = params
    x = F.avg_pool2d(F.relu(F.conv2d(x, conv1, bias1)), 2)
    x = F.avg_pool2d(F.relu(F.conv2d(x, conv2, bias2)), 2)
    x = F.relu(F.linear(x.flatten(1), hidden, bias3))
    return F.linear(x, head, bias4)


# Without several GPUs the lesson still holds: a device is then only a name for "its own copy of the
# parameters and its own part of the batch". Such replicas show that the sums are right; they cannot
# show a gain in speed.
def get_devices(num_devices: int) -> list[torch.device]:
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return [torch.device("cpu")] * num_devices
    return [torch.device("cuda", i % gpus) for i in range(num_devices)]


def get_params(params: list[Tensor], device: torch.device) -> list[Tensor]:
    """A copy of the parameters on a device, each with a gradient that starts at zero."""
    # copy=True: on the device where it already lives, `to` alone would return the same tensor, and
    # two replicas on one device would then share what each is meant to own.
    copies = [p.detach().to(device, copy=True).requires_grad_() for p in params]
    for p in copies:
        p.grad = torch.zeros_like(p)
    return copies


def allreduce(tensors: list[Tensor]) -> None:
    """One tensor per device, in place: afterwards each holds the sum of all."""
    # The naive way: everything goes to the first device and back. With k devices it sends and
    # receives k − 1 tensors while the others idle; a ring would spread that over all links.
    total, *others = tensors
    for tensor in others:
        total += tensor.to(total.device)
    for tensor in others:
        tensor.copy_(total)


def allreduce_grouped(groups: list[list[Tensor]]) -> None:
    """One list of tensors per device: like `allreduce` for each position, but in one go."""
    # Each transfer has a fixed cost however small it is, and LeNet has four biases of a few hundred
    # bytes. One long buffer pays that cost once instead of once per tensor.
    buffers = [torch.cat([tensor.flatten() for tensor in group]) for group in groups]
    allreduce(buffers)
    for buffer, group in zip(buffers, groups, strict=True):
        parts = buffer.split([tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def split_batch(x: Tensor, y: Tensor, devices: list[torch.device]) -> list[tuple[Tensor, Tensor]]:
    """Consecutive parts of a batch: the first on the first device, and so on."""
    # An uneven batch is no special case: the first len(x) % k devices take one sample more. When
    # there are fewer samples than devices, there are fewer parts, and the last devices get none.
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
    """One step of SGD on all devices. Returns the mean loss of the batch, on the first device."""
    # Each device sums its losses and divides by the size of the WHOLE batch. The sum over devices
    # is then the mean over samples, however they were split. Taking the mean on each device would
    # be wrong twice: k times too large, and in an uneven split not every sample would count alike.
    parts = split_batch(x, y, devices)
    losses = [
        F.cross_entropy(lenet(part_x, params), part_y, reduction="sum") / len(x)
        for (part_x, part_y), params in zip(parts, device_params, strict=False)
    ]
    # A GPU runs behind the host, so the forward passes above overlap. One call for all losses lets
    # the backward passes overlap too: autograd has a thread for each GPU.
    torch.autograd.backward(losses)

    grads = [[p.grad for p in params] for params in device_params]
    if naive:
        for same_parameter in zip(*grads, strict=True):
            allreduce(list(same_parameter))
    else:
        allreduce_grouped(grads)

    # Equal parameters and equal gradients: every device takes the same step, and no parameter ever
    # has to be sent again. The gradients return to zero, because backward adds to what is there;
    # a device without samples in the next batch must add nothing.
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
    """Right answers in a batch: counts, unlike means, can be added over devices as they are."""
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
    """Train LeNet; returns the parameters of the first device and what each epoch gave."""
    # `batch_size` counts samples over all devices. So the learning rate needs no change when the
    # number of devices does, and runs with 1, 2 or 4 devices can be compared number by number.
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
        # Only here is a loss read by the host: reading it in each step would make the host wait for
        # the devices. This also makes the time include all the work that was queued.
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
