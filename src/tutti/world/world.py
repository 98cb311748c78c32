"""World: who this process is among all the others, as one frozen value."""

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tutti.world.gloo_rest import let_gloo_rest

if TYPE_CHECKING:
    from tutti.world.failure import Watch
    from tutti.world.rendezvous import Meeting


@dataclass(frozen=True)
class World:
    """Who this process is. `reasons` says for every value where it came from.

    Use it as a context manager, so that the process group is torn down whatever happens:

        with tutti.init() as world:
            model.to(world.device)
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    host: str
    device: torch.device
    backend: str
    launcher: str
    master: str
    cpus: str
    threads: int
    ranks_on_device: int
    reasons: Mapping[str, str]
    # The store of rank 0 must live as long as the world does, and so must its watch.
    _meeting: "Meeting" = field(repr=False, compare=False)
    _watch: "Watch" = field(repr=False, compare=False)
    # The environment variables that were set for this world's backends, and end with it.
    _variables: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes for all."""
        return self.rank == 0

    @property
    def sharing_note(self) -> str | None:
        """What every output must say when ranks share a GPU; None when they do not."""
        if self.ranks_on_device < 2:
            return None
        return (
            f"{self.ranks_on_device} ranks share one GPU: figures show correctness and software "
            "overhead, not links between GPUs"
        )

    def row(self) -> dict[str, Any]:
        """This rank's row for tables and JSON."""
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "node": self.node,
            "host": self.host,
            "device": str(self.device),
            "backend": self.backend,
            "launcher": self.launcher,
            "cpus": self.cpus,
            "threads": self.threads,
            "ranks_on_device": self.ranks_on_device,
            "reasons": dict(self.reasons),
        }

    def close(self) -> None:
        """Leave the world: tear the process group down. Safe to call twice."""
        atexit.unregister(self.close)
        if dist.is_initialized():  # unless the script has torn it down itself
            if self._watch.failed and self.device.type == "cuda":
                # An orderly end would wait for peers that will never come.
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
                let_gloo_rest()
        self._watch.stop()
        for name in self._variables:
            os.environ.pop(name, None)

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        # A reader that has gone (`tutti world | head`) is no failure either.
        well = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not well and not isinstance(error, BrokenPipeError):
            self._watch.handle(error)
        self.close()
