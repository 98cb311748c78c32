"""Room for messages in the hosts' memory, looked at before anything is measured."""

from tutti.machine.cpu_numa import read_memory
from tutti.machine.sysfs import SysFiles
from tutti.measure.units import format_bytes, format_size
from tutti.world.errors import UsageError
from tutti.world.exchange import gather_json
from tutti.world.world import World


def check_room(size: int, world: World) -> None:
    """Refuse messages of `size` bytes where a host has no memory for them. Collective.

    Every rank holds what it sends and what must arrive, at the least. Where that does not fit,
    ranks would be killed in the middle, and what was measured would be lost with them.
    """
    available = read_memory(SysFiles()).available_bytes
    for ranks, having in gather_json((world.local_size, available)):
        needed = 2 * size * ranks
        if having is not None and needed > having:
            raise UsageError(
                f"--sizes {format_size(size)}: {ranks} rank{'s' * (ranks > 1)} of a host need "
                f"{format_bytes(needed)} of memory and more, and {format_bytes(having)} are free: "
                "use smaller sizes or fewer ranks"
            )
