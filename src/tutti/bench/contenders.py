"""The backends that names on the command line mean, and why one may not be here."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from tutti.bench.attempt import Unsupported
from tutti.bench.case import Buffers, Contender
from tutti.bench.mpi import OpenMpi
from tutti.bench.symmetric_calls import Staged, SymmetricCollective, ZeroCopy
from tutti.bench.torch_calls import TorchBackend
from tutti.comm.symmetric import Heap
from tutti.comm.symmetric.heap_collectives import Stage
from tutti.world.errors import UsageError
from tutti.world.world import World

_ALGORITHMS = {"one-shot": "one_shot", "two-shot": "two_shot", "ring": "ring"}


@contextmanager
def contenders(
    names: Sequence[str], world: World, largest: int
) -> Iterator[tuple[list[Contender], list[dict[str, str]]]]:
    """A contender for each name that this world has, and a reason for each that it has not.

    Collective, at the beginning and at the end. `largest` is the largest message in bytes.
    """
    with ExitStack() as stack:
        maker = _Maker(world, largest, stack)
        found: list[Contender] = []
        missing = []
        for name in names:
            try:
                found.append(maker.make(name))
            except (Unsupported, UsageError) as error:
                missing.append({"backend": name, "reason": str(error)})
        yield found, missing


def process_group(name: str) -> tuple[dist.ProcessGroup, str]:
    """A group of its own over all ranks, and what there is to say about it."""
    about = ""
    if name == "shm":
        from tutti.comm.shm import available, register

        usable, about = available()
        if not usable:
            raise Unsupported(about)
        register()
    group = dist.new_group(backend=name)
    assert isinstance(group, dist.ProcessGroup)
    return group, about


class _Maker:
    def __init__(self, world: World, largest: int, stack: ExitStack) -> None:
        self._world = world
        self._on_cpu = world.device.type == "cpu"
        self._largest = largest
        self._stack = stack
        self._buffers = Buffers(world.device)

    def make(self, name: str) -> Contender:
        if name == "nccl" and self._on_cpu:
            raise Unsupported("NCCL moves CUDA tensors only: use --device cuda")
        if name in ("mpi", "shm") and not self._on_cpu:
            raise Unsupported("it moves CPU tensors only: use --device cpu")
        if name == "mpi":
            return self._mpi()
        if name == "symmetric" and self._on_cpu:
            group, about = process_group("shm")
            return ZeroCopy(name, group, self._new_heap(group), about)
        if name == "staged":
            stage = Stage(device=self._world.device)
            self._stack.callback(stage.close)
            return Staged(name, stage, self._buffers)
        if name == "symmetric" or name in _ALGORITHMS:
            return SymmetricCollective(name, self._new_heap(None), _ALGORITHMS.get(name, "auto"))
        return TorchBackend(name, *process_group(name), self._buffers)

    def _new_heap(self, group: dist.ProcessGroup | None) -> Heap:
        # What is sent and what is received, with room for alignment between them.
        heap = Heap(group, bytes=2 * self._largest + (1 << 20), device=self._world.device)
        return self._stack.enter_context(heap)

    def _mpi(self) -> Contender:
        try:
            return OpenMpi(self._buffers, self._world.size)
        except ImportError as error:
            raise Unsupported(f"{error}: pip install 'tutti-torch[mpi]'") from None
