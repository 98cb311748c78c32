"""Training programs that hang or die on purpose. None of them knows tutti, except `tutti`.

    python hanging_programs.py PROGRAM BACKEND FAULT

Each rank is started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. In step 3, FAULT happens on
rank 1. The line with the comment `# here: FAULT` is the line that an explanation must name.
"""

import ctypes
import fcntl
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULT_STEP, GUILTY, LONG = 3, 1, 1000.0

Fault = Callable[[int], None]  # called with the rank, on every rank, before the step's collective


def _on_guilty(function: Callable[[], object]) -> Fault:
    return lambda rank: function() if rank == GUILTY else None  # type: ignore[return-value]


# -- faults in the training loop -------------------------------------------------------------------


def sleeps() -> None:
    time.sleep(LONG)  # here: sleeps


def computes() -> None:
    number = 0
    while True:
        number += 1  # here: computes


def keeps_gil() -> None:
    ctypes.PyDLL(None).sleep(int(LONG))  # here: keeps_gil


def deadlocks() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # here: deadlocks


def waits_for_a_queue() -> None:
    queue.Queue[int]().get()  # here: waits_for_a_queue


def waits_for_a_child() -> None:
    subprocess.run(["sleep", str(int(LONG))])  # here: waits_for_a_child


def waits_for_a_socket() -> None:
    ours, _theirs = socket.socketpair()
    ours.recv(1)  # here: waits_for_a_socket


def reads_a_file() -> None:
    path = Path(tempfile.mkdtemp()) / "slow_storage"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR)  # a writer exists, but writes nothing
    with open(path, "rb", buffering=0) as file:
        file.read(1)  # here: reads_a_file
    os.close(keep)


def opens_a_file() -> None:
    path = Path(tempfile.mkdtemp()) / "slow_storage"
    os.mkfifo(path)
    path.read_bytes()  # here: opens_a_file


def waits_for_a_file_lock() -> None:
    path = Path(tempfile.mkdtemp()) / "lock"
    other = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    own = os.open(path, os.O_RDWR)
    fcntl.flock(own, fcntl.LOCK_EX)  # here: waits_for_a_file_lock


def raises() -> None:
    raise ValueError("the planted error @ step 3 of file \udcff")  # here: raises


def exits_with_a_reason() -> None:
    sys.exit("the loss is not a number")  # here: exits_with_a_reason


def saves_a_file() -> None:
    path = Path(tempfile.mkdtemp()) / "slow_storage"
    os.mkfifo(path)
    torch.save(torch.ones(1), path)  # here: saves_a_file


def joins_a_thread() -> None:
    def other_thread() -> None:
        time.sleep(LONG)  # here: joins_a_thread

    thread = threading.Thread(target=other_thread, daemon=True)
    thread.start()
    thread.join()


def runs_out_of_memory() -> None:
    torch.empty(1 << 60)  # here: runs_out_of_memory


def exits_early() -> None:
    sys.exit(0)


def is_killed() -> None:
    time.sleep(1.5)  # here: is_killed
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    time.sleep(1.5)  # here: is_stopped
    os.kill(os.getpid(), signal.SIGSTOP)


def other_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(8 if rank == GUILTY else 4))  # here: other_shape


def other_dtype(rank: int) -> None:
    dtype = torch.float64 if rank == GUILTY else torch.float32
    dist.all_reduce(torch.ones(4, dtype=dtype))  # here: other_dtype


def other_operation(rank: int) -> None:
    if rank == GUILTY:
        dist.broadcast(torch.ones(4), 0)  # here: other_operation
    else:
        dist.all_reduce(torch.ones(4))


def other_root(rank: int) -> None:
    dist.broadcast(torch.ones(4), GUILTY if rank == GUILTY else 0)  # here: other_root


def extra_barrier(rank: int) -> None:
    if rank == GUILTY:
        dist.barrier()  # here: extra_barrier


def other_branch(rank: int) -> None:
    if rank == GUILTY:
        parts = [torch.ones(2) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.ones(2))  # here: other_branch
    else:
        dist.reduce(torch.ones(2), 0)


def crossed_groups(rank: int) -> None:
    first, second = GROUPS["first"], GROUPS["second"]
    if rank == GUILTY:
        first, second = second, first
    if rank in (0, GUILTY):
        dist.all_reduce(torch.ones(4), group=first)  # here: crossed_groups
        dist.all_reduce(torch.ones(4), group=second)


def missing_in_subgroup(rank: int) -> None:
    if rank == GUILTY:
        time.sleep(LONG)  # here: missing_in_subgroup
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=GROUPS["first"])


def missing_send(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(4), GUILTY)
    if rank == GUILTY:
        time.sleep(LONG)  # here: missing_send


def both_receive(rank: int) -> None:
    if rank in (0, GUILTY):
        dist.recv(torch.ones(4), GUILTY - rank)  # here: both_receive


def missing_receive(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(1 << 24), GUILTY)
    if rank == GUILTY:
        time.sleep(LONG)  # here: missing_receive


def wrong_tag(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(4), GUILTY, tag=7)
    if rank == GUILTY:
        dist.send(torch.ones(4), 0, tag=8)  # here: wrong_tag


def wrong_peer(rank: int) -> None:
    size = dist.get_world_size()
    right = 0 if rank == GUILTY else (rank + 1) % size
    work = dist.isend(torch.ones(4), right)  # here: wrong_peer
    dist.recv(torch.ones(4), (rank - 1) % size)
    work.wait()


def polls_an_operation(rank: int) -> None:
    if rank == GUILTY:
        time.sleep(LONG)  # here: polls_an_operation
    work = dist.all_reduce(torch.ones(4), async_op=True)
    while not work.is_completed():
        time.sleep(0.05)


def late_new_group(rank: int) -> None:
    if rank == GUILTY:
        time.sleep(LONG)  # here: late_new_group
    dist.new_group([0, GUILTY])


def many_groups(rank: int) -> None:
    for _ in range(140):
        group = dist.new_group([0, GUILTY])
    if rank == GUILTY:
        time.sleep(LONG)  # here: many_groups
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=group)


def heartbeats(rank: int) -> None:
    group = dist.new_group([0, GUILTY])

    def beat() -> None:
        while True:
            dist.all_reduce(torch.ones(1), group=group)
            time.sleep(0.2)

    if rank in (0, GUILTY):
        threading.Thread(target=beat, daemon=True).start()
    if rank == GUILTY:
        time.sleep(LONG)  # here: heartbeats


def object_list_length(rank: int) -> None:
    objects: list[object] = [None] * (3 if rank == GUILTY else 2)
    dist.broadcast_object_list(objects, 0)  # here: object_list_length


def all_read_a_file(_: int) -> None:
    path = Path(tempfile.mkdtemp()) / "slow_storage"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR)
    with open(path, "rb", buffering=0) as file:
        file.read(1)  # here: all_read_a_file
    os.close(keep)


def slow_but_alive(_: int) -> None:
    SLOW.append(0.4)


GROUPS: dict[str, dist.ProcessGroup] = {}
SLOW: list[float] = []

# Faults that happen in the loop of every program, and the classes that explain them.
ANYWHERE: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "sleeps": (_on_guilty(sleeps), ("sleeping",)),
    "computes": (_on_guilty(computes), ("busy",)),
    "keeps_gil": (_on_guilty(keeps_gil), ("gil",)),
    "deadlocks": (_on_guilty(deadlocks), ("waiting",)),
    "waits_for_a_queue": (_on_guilty(waits_for_a_queue), ("waiting",)),
    "waits_for_a_child": (_on_guilty(waits_for_a_child), ("waiting",)),
    "waits_for_a_socket": (_on_guilty(waits_for_a_socket), ("waiting",)),
    "reads_a_file": (_on_guilty(reads_a_file), ("storage",)),
    "opens_a_file": (_on_guilty(opens_a_file), ("storage",)),
    "waits_for_a_file_lock": (_on_guilty(waits_for_a_file_lock), ("storage",)),
    "raises": (_on_guilty(raises), ("error",)),
    "exits_with_a_reason": (_on_guilty(exits_with_a_reason), ("error",)),
    "saves_a_file": (_on_guilty(saves_a_file), ("storage",)),
    "joins_a_thread": (_on_guilty(joins_a_thread), ("waiting",)),
    "runs_out_of_memory": (_on_guilty(runs_out_of_memory), ("out_of_memory",)),
    "exits_early": (_on_guilty(exits_early), ("ended_early", "uneven_batches")),
    "is_killed": (_on_guilty(is_killed), ("dead",)),
    "is_stopped": (_on_guilty(is_stopped), ("stopped",)),
    "extra_barrier": (extra_barrier, ("mismatch", "order")),
    "all_read_a_file": (all_read_a_file, ("storage",)),
    "slow_but_alive": (slow_but_alive, ("progress",)),
}
# Faults of the plain program, which has three ranks and calls torch.distributed itself.
PLAIN: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "other_shape": (other_shape, ("mismatch",)),
    "other_dtype": (other_dtype, ("mismatch",)),
    "other_operation": (other_operation, ("mismatch",)),
    "other_root": (other_root, ("mismatch",)),
    "other_branch": (other_branch, ("mismatch",)),
    "crossed_groups": (crossed_groups, ("order",)),
    "missing_in_subgroup": (missing_in_subgroup, ("sleeping",)),
    "missing_send": (missing_send, ("missing_send",)),
    "both_receive": (both_receive, ("missing_send",)),
    "missing_receive": (missing_receive, ("missing_receive",)),
    "wrong_tag": (wrong_tag, ("missing_message",)),
    "wrong_peer": (wrong_peer, ("missing_message",)),
    "polls_an_operation": (polls_an_operation, ("sleeping",)),
    "late_new_group": (late_new_group, ("sleeping",)),
    "many_groups": (many_groups, ("sleeping",)),
    "heartbeats": (heartbeats, ("sleeping",)),
    "object_list_length": (object_list_length, ("mismatch",)),
}


# -- faults in the data loader ---------------------------------------------------------------------


def item_sleeps() -> None:
    time.sleep(LONG)  # here: item_sleeps


def worker_sleeps() -> None:
    time.sleep(LONG)  # here: worker_sleeps


def worker_is_stopped() -> None:
    time.sleep(1.5)  # here: worker_is_stopped
    os.kill(os.getpid(), signal.SIGSTOP)


def worker_is_killed() -> None:
    time.sleep(1.5)  # here: worker_is_killed
    os.kill(os.getpid(), signal.SIGKILL)


LOADER: dict[str, tuple[Callable[[], None] | None, tuple[str, ...]]] = {
    "item_sleeps": (item_sleeps, ("input", "sleeping")),
    "worker_sleeps": (worker_sleeps, ("loader_worker_stuck",)),
    "worker_is_stopped": (worker_is_stopped, ("loader_worker_stuck",)),
    "worker_is_killed": (worker_is_killed, ("loader_worker_dead", "error")),
    "fewer_batches": (None, ("uneven_batches", "ended_early", "mismatch")),
}
PROGRAMS = ("plain", "ddp", "fsdp2", "accelerate", "lightning", "tutti")


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of which one triggers a fault of the data loader on the guilty rank."""

    def __init__(self, fault: str, rank: int, batch: int) -> None:
        self.fault, self.rank, self.batch = fault, rank, batch
        self.fetched = 0

    def __len__(self) -> int:
        if self.fault == "fewer_batches":
            return self.batch * (FAULT_STEP if self.rank == GUILTY else 400)
        return self.batch * 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.fetched += 1
        after = self.fetched > self.batch * FAULT_STEP
        if self.rank == GUILTY and self.fault in LOADER and after:
            plant = LOADER[self.fault][0]
            if plant is not None:
                plant()
        return torch.ones(16), torch.zeros(4)


class Model(nn.Module):
    """A small model whose forward triggers the faults of the training loop."""

    def __init__(self, fault: str, rank: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.fault, self.rank, self.calls = fault, rank, 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        plant(self.fault, self.rank, self.calls)
        result: torch.Tensor = self.layers(values)
        return result


def plant(fault: str, rank: int, step: int) -> None:
    time.sleep(0.02 + sum(SLOW))
    if fault == "pauses" and step % 4 == 0 and rank == 0:
        time.sleep((0.5, 1.0, 2.0)[step // 4 % 3])
    if step == FAULT_STEP and fault in ANYWHERE | PLAIN:
        (ANYWHERE | PLAIN)[fault][0](rank)


# -- programs --------------------------------------------------------------------------------------


def train_plain(backend: str, fault: str, rank: int, loader: DataLoader) -> None:
    dist.init_process_group(backend, timeout=timedelta(seconds=LONG))
    GROUPS["first"] = dist.new_group([0, GUILTY], group_desc="first")
    GROUPS["second"] = dist.new_group([0, GUILTY], group_desc="second")
    model = Model(fault, rank)
    for values, _ in loader:
        loss = model(values).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def train_ddp(backend: str, fault: str, rank: int, loader: DataLoader) -> None:
    dist.init_process_group(backend, timeout=timedelta(seconds=LONG))
    model = nn.parallel.DistributedDataParallel(Model(fault, rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for values, _ in loader:
        model(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_fsdp2(backend: str, fault: str, rank: int, loader: DataLoader) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(backend, timeout=timedelta(seconds=LONG))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model(fault, rank)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for values, _ in loader:
        model(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_accelerate(backend: str, fault: str, rank: int, loader: DataLoader) -> None:
    from accelerate import Accelerator, InitProcessGroupKwargs

    options = InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=LONG))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    model = Model(fault, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for values, _ in loader:
        accelerator.backward(model(values).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def train_lightning(backend: str, fault: str, rank: int, loader: DataLoader) -> None:
    import logging

    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(fault, rank)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=backend, timeout=timedelta(seconds=LONG)),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), loader)


def train_tutti(backend: str, fault: str, rank: int, loader: DataLoader) -> None:
    import tutti

    with tutti.init(backend=backend, device="cpu", timeout=LONG) as world:
        model = tutti.parallelize(Model(fault, rank), world=world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for values, _ in loader:
            model(values).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    program, backend, fault = sys.argv[1:]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if backend == "shm" and program != "tutti":
        from tutti.comm.shm.registration import register

        register()  # torch does this at `import torch`; a forked test process imported it before
    workers = 1 if fault.startswith("worker") else 0
    context = multiprocessing.get_context("fork") if workers else None
    samples = Samples(fault, rank, batch=2)
    loader = DataLoader(samples, batch_size=2, num_workers=workers, multiprocessing_context=context)
    globals()[f"train_{program}"](backend, fault, rank, loader)


def line_of(fault: str) -> int | None:
    """Return the number of the line with the comment `# here: FAULT`, or None."""
    for number, line in enumerate(Path(__file__).read_text().splitlines(), start=1):
        if line.endswith(f"# here: {fault}"):
            return number
    return None


if __name__ == "__main__":
    main()
