"""All-reduce written with nothing but messages, in two ways: a ring and a tree.

Teaching baselines beside the backend's own. n ranks, S bytes, α seconds to get a message under way
and β seconds for a byte:

    ring: 2 (n − 1) steps of S / n bytes: 2 (n − 1) α + 2 (n − 1) / n · S β
    tree: 2 ⌈log2 n⌉ steps of S bytes:    2 ⌈log2 n⌉ (α + S β)

So a tree is fast for small messages on many ranks, and a ring for large ones: every rank sends
little more than 2 S, however many there are. On two ranks a ring sends two halves where the tree
sends the whole twice.
"""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from tutti.bench.attempt import Unsupported
from tutti.bench.case import Buffers, Case, Prepared


class PointToPoint:
    """A contender for a sweep: all_reduce in place, by one of the two algorithms."""

    def __init__(
        self, name: str, group: dist.ProcessGroup, algorithm: str, buffers: Buffers
    ) -> None:
        self.name = name
        self.about = f"all_reduce as a {algorithm} of messages, a teaching baseline"
        self._group = group
        self._algorithm: Callable[[Tensor, Tensor, dist.ProcessGroup], None] = {
            "ring": ring_all_reduce,
            "tree": tree_all_reduce,
        }[algorithm]
        self._buffers = buffers

    def prepare(self, case: Case) -> Prepared:
        """The case on ordinary tensors."""
        if case.operation.name != "all_reduce" or case.placement != "in":
            raise Unsupported("it is an all_reduce in place")
        work = self._buffers.take("received", case.count, case.dtype)
        room = self._buffers.take("room", case.count, case.dtype)
        return Prepared(work, work, partial(self._algorithm, work, room, self._group))


def ring_all_reduce(tensor: Tensor, room: Tensor, group: dist.ProcessGroup) -> None:
    """Sum over all ranks, in place. `room` is as large as the tensor.

    Parts go round: first each rank adds its own to what comes by, until every part is complete on
    one rank; then the complete ones go round.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parts, rooms = tensor.tensor_split(ranks), room.tensor_split(ranks)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        sent, come = (rank - step) % ranks, (rank - step - 1) % ranks
        shift((parts[sent], after), (rooms[come], before), group)
        parts[come].add_(rooms[come])
    for step in range(ranks - 1):
        sent, come = (rank + 1 - step) % ranks, (rank - step) % ranks
        shift((parts[sent], after), (parts[come], before), group)


def tree_all_reduce(tensor: Tensor, room: Tensor, group: dist.ProcessGroup) -> None:
    """Sum over all ranks, in place: pairs, pairs of pairs and so on add up to rank 0, and back."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    distances = [1 << level for level in range((ranks - 1).bit_length())]
    for distance in distances:
        # Who is a multiple of twice the distance collects; who is one of the distance only, gives.
        if rank % (2 * distance) == distance:
            shift((tensor, rank - distance), None, group)
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            shift(None, (room, rank + distance), group)
            tensor.add_(room)
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            shift(None, (tensor, rank - distance), group)
        elif rank % (2 * distance) == 0 and rank + distance < ranks:
            shift((tensor, rank + distance), None, group)


def shift(
    sent: tuple[Tensor, int] | None,
    received: tuple[Tensor, int] | None,
    group: dist.ProcessGroup,
) -> None:
    """Send a tensor to a rank and receive another from one, at the same time; each may be None.

    An empty tensor is no message: its length is the same on both sides.
    """
    # NCCL would deadlock on a ring of sends that wait for their receives: both go as one.
    ways = ((dist.isend, sent), (dist.irecv, received))
    messages = [(how, *what) for how, what in ways if what is not None and what[0].numel()]
    if messages and messages[0][1].is_cuda:
        as_one = [dist.P2POp(how, tensor, peer, group=group) for how, tensor, peer in messages]
        works: list[dist.Work | None] = [*dist.batch_isend_irecv(as_one)]
    else:
        works = [how(tensor, peer, group=group) for how, tensor, peer in messages]
    for work in works:
        if work is not None:
            work.wait()
