"""Ports, addresses and interfaces: which are free, and which of them other ranks can reach."""

import fcntl
import hashlib
import random
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.rendezvous import RankInfo

# Outside Linux' ephemeral range (32768 to 60999), so that no outgoing connection takes one.
_PORTS = range(20000, 30000)
_CANDIDATES = 5


def port_candidates(job: str) -> list[int]:
    """The ports a job tries, in order: the same on every rank, others for another job."""
    digest = hashlib.sha256(job.encode()).digest()
    return [
        _PORTS[int.from_bytes(digest[2 * i : 2 * i + 2]) % len(_PORTS)] for i in range(_CANDIDATES)
    ]


def free_port() -> int:
    """A port that nobody listens on at this moment, and that no outgoing connection takes."""
    # Not the seeded generator that a training script may share: this one is the system's.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UsageError(f"all ports from {_PORTS[0]} to {_PORTS[-1]} are in use on this host")


def local_address_towards(address: str) -> str | None:
    """The address of this host that packets to `address` leave from; None if it has no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket: chooses a route, sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def gloo_interface(
    answers: "Sequence[RankInfo]", rank: int, env: Mapping[str, str]
) -> tuple[str | None, str]:
    """The interface gloo should use: loopback on one machine, else the one that reaches peers.

    Left to itself gloo takes the address its host name resolves to, which is often 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in env:
        return None, "GLOO_SOCKET_IFNAME"
    mine = answers[rank]
    far = [answer for answer in answers if answer.machine != mine.machine]
    if not far:
        return "lo", "all ranks are on this machine"
    # Ranks beside the store know no more than loopback; any far rank told how it reached us.
    addresses = [address for a in far if (address := _outside_address(a)) is not None]
    own = _outside_address(mine)
    if own is None and addresses:
        own = local_address_towards(addresses[0])
    name = _interface_with(own) if own else None
    if name is None:
        return None, "left to gloo: no route to the other machines was found"
    return name, f"it reaches {far[0].host}"


def _outside_address(answer: "RankInfo") -> str | None:
    return None if answer.address.startswith("127.") else answer.address or None


def _interface_with(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
