"""A live probe: an all_reduce with gloo over all ranks, on the interfaces that a job would use."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tutti.machine.checks.company import Company
from tutti.world.addresses import gloo_interface

_SECONDS = 30.0
_ELEMENTS = 100_003


def all_reduce_exactly(company: Company) -> tuple[str, ...]:
    """For each rank, what was wrong; "" for nothing."""
    return tuple(company.gather(_try(company)))


def _try(company: Company) -> str:
    interface, _ = gloo_interface(company.answers, company.rank, os.environ)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", company.store),
            rank=company.rank,
            world_size=company.size,
            timeout=timedelta(seconds=_SECONDS),
        )
        # Whole numbers below 2^24: their sum is exact in whatever order it is made.
        index = torch.arange(_ELEMENTS) % 1000
        value = (index + company.rank).float()
        dist.all_reduce(value)
        expected = index * company.size + company.size * (company.size - 1) // 2
        wrong = int((value != expected).sum())
        return f"{wrong} of {_ELEMENTS} elements are wrong" if wrong else ""
    except Exception as error:
        return f"gloo: {str(error).splitlines()[0]}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if interface:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
