"""The ranks of a world, met in the store alone: no process group that a fault could hang.

What is wrong with a network shows before gloo or NCCL has come up. So ranks exchange what they
found as JSON through the store of the roll call, and talk to each other over plain sockets.
"""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tutti.world.addresses import local_address_towards
from tutti.world.errors import UsageError
from tutti.world.exchange import RanksMissing, gather_json_from_store
from tutti.world.launchers import identify
from tutti.world.rendezvous import RankInfo, describe_rank, exchange_rank_info, open_rendezvous

if TYPE_CHECKING:
    import torch.distributed as dist

# A rank that is busy with an active test answers late; one that is gone, never.
_PATIENCE_SECONDS = 120.0


@dataclass
class Company:
    """All ranks, and who is on which host."""

    rank: int
    answers: Sequence[RankInfo]
    store: "dist.Store"
    hosts: list[int] = field(init=False)
    """For each rank, the number of its host, in the order of their lowest ranks."""
    _turn: int = 0

    def __post_init__(self) -> None:
        machines = list(dict.fromkeys(answer.machine for answer in self.answers))
        self.hosts = [machines.index(answer.machine) for answer in self.answers]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.answers)

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each host."""
        return [self.hosts.index(host) for host in range(max(self.hosts) + 1)]

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.rank in self.leaders

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; also a barrier."""
        self._turn += 1
        try:
            return gather_json_from_store(
                self.store, str(self._turn), value, self.rank, self.size, _PATIENCE_SECONDS
            )
        except RanksMissing as missing:
            raise UsageError(
                f"rank {', '.join(map(str, missing.ranks))} did not answer for "
                f"{_PATIENCE_SECONDS:.0f} s: see its output, or run tutti doctor on its host alone"
            ) from None
        except RuntimeError:
            raise UsageError("the store ended with rank 0: see the output of rank 0") from None

    def own_address(self) -> str:
        """The address by which other ranks reach this one."""
        mine = self.answers[self.rank]
        far = [answer for answer in self.answers if answer.machine != mine.machine]
        if not far:
            return "127.0.0.1"
        said = os.environ.get("GLOO_SOCKET_IFNAME")
        if said and (address := _address_of(said.split(",")[0])):
            return address
        if mine.address and not mine.address.startswith("127."):
            return mine.address
        # Beside the store only loopback is known; a far rank's address shows the way out.
        known = [a.address for a in far if a.address and not a.address.startswith("127.")]
        return (known and local_address_towards(known[0])) or mine.host


@contextlib.contextmanager
def gather_company(start_timeout: float) -> Iterator[Company]:
    """Meet all ranks that the launcher started."""
    import torch.distributed as dist

    identity = identify(os.environ)
    meeting = open_rendezvous(identity, start_timeout)
    address = local_address_towards(meeting.host) if meeting.host else None
    answer = describe_rank(identity, address or "", _visible_gpus())
    roll = exchange_rank_info(meeting.store, answer, identity.size, start_timeout)
    store = dist.PrefixStore(f"tutti/machine/checks/{roll.start_id}", meeting.store)
    company = Company(identity.rank, roll.ranks, store)
    yield company
    # The store goes with rank 0: nobody may still be reading from it.
    store.set(f"bye/{identity.rank}", "")
    if identity.rank == 0:
        with contextlib.suppress(RuntimeError):
            keys = [f"bye/{rank}" for rank in range(identity.size)]
            store.wait(keys, timedelta(seconds=10))


def _visible_gpus() -> list[str]:
    from tutti.world.placement import visible_gpus

    try:
        return visible_gpus()
    except RuntimeError:  # a driver that does not start is for the checks to tell
        return []


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, 0x8915, struct.pack("256s", interface.encode()))
        except OSError:  # no such interface, or none with an IPv4 address; 0x8915: SIOCGIFADDR
            return None
    return socket.inet_ntoa(reply[20:24])
