"""Ports, addresses and network interfaces: which are free, and which reach the other ranks."""

import hashlib
import random
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tutti.machine.nics import interface_address
from tutti.world.errors import UsageError

if TYPE_CHECKING:
    from tutti.world.rendezvous import RankInfo

# Outside Linux's ephemeral range (32768 to 60999), so that no outgoing connection uses these ports.
_PORTS = range(20000, 30000)
_CANDIDATES = 5


def port_candidates(job: str) -> list[int]:
    """The ports that a job tries, in order: the same on every rank, different for another job."""
    digest = hashlib.sha256(job.encode()).digest()
    return [
        _PORTS[int.from_bytes(digest[2 * i : 2 * i + 2]) % len(_PORTS)] for i in range(_CANDIDATES)
    ]


def free_port() -> int:
    """A port on which no process listens now, and which no outgoing connection uses."""
    # SystemRandom, so that the seeded generator of a training script is not advanced.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UsageError(f"all ports from {_PORTS[0]} to {_PORTS[-1]} are in use on this host")


def local_address_towards(address: str) -> str | None:
    """This host's source address for packets to `address`; None if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # on a datagram socket this selects a route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def gloo_interface(
    ranks: "Sequence[RankInfo]", rank: int, env: Mapping[str, str]
) -> tuple[str | None, str]:
    """The network interface for gloo (None: gloo's default), and the reason for the choice.

    Loopback if all ranks are on one machine, otherwise an interface that reaches the other
    machines. By default gloo uses the address of the host name, which is often 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in env:
        return None, "GLOO_SOCKET_IFNAME"
    own = ranks[rank]
    remote = [each for each in ranks if each.machine != own.machine]
    if not remote:
        return "lo", "all ranks are on this machine"
    # The RankInfo of a rank on the store's host has only a loopback address. The route to the
    # address of a remote rank then determines the interface.
    address = own.address
    if not address or address.startswith("127."):
        addresses = (each.address for each in remote)
        external = next((a for a in addresses if a and not a.startswith("127.")), None)
        address = (external and local_address_towards(external)) or ""
    for _, name in socket.if_nameindex():
        if address and interface_address(name) == address:
            return name, f"it reaches {remote[0].host}"
    return None, "gloo's default: no route to the other machines was found"
