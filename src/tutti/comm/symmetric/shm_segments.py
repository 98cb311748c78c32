"""The segments under a heap: each rank makes one, and opens those of all others."""

import ctypes
import secrets
import weakref
from typing import Any

from tutti.comm.symmetric.meeting import Meeting, refuse_different_heaps
from tutti.world.errors import UsageError


def meet(meeting: Meeting, core: Any, bytes: int, agreed: list[int]) -> list[Any]:
    """Every rank's segment, in rank order; or the same error on all ranks.

    That a peer's segment can be opened, and holds the number that the peer wrote there, is also the
    test of whether the two share a host.
    """
    own = core.tutti_segment_create(f"heap {meeting.number}".encode(), bytes)
    failure = None if own else core.tutti_error().decode()
    token = secrets.randbits(62)
    if own:
        _token(core, own).value = token
    fd = core.tutti_segment_fd(own) if own else -1
    segments: list[Any] = [own] if own else []
    try:
        cards = meeting.introduce(agreed, failure, {"fd": fd, "token": token})
        refuse_different_heaps(cards)
        by_rank = []
        for rank, card in enumerate(cards):
            if rank == meeting.rank:
                by_rank.append(own)
                continue
            opened = core.tutti_segment_open(card["pid"], card["fd"], bytes)
            if not opened:
                failure = _strangers(meeting.rank, rank, cards, core.tutti_error().decode())
                break
            segments.append(opened)
            by_rank.append(opened)
            if _token(core, opened).value != card["token"]:
                failure = _strangers(meeting.rank, rank, cards, "its process id is another's")
        for text in meeting.tell(failure):
            if text is not None:
                raise UsageError(text)
    except BaseException:
        for segment in segments:
            core.tutti_segment_close(segment)
        raise
    return by_rank


def mapped(core: Any, segment: Any, base: int, bytes: int) -> Any:
    """A segment as a buffer; it is unmapped when neither the heap nor a tensor uses it any more."""

    class Mapping(ctypes.Array):  # type: ignore[type-arg]
        _type_ = ctypes.c_char
        _length_ = bytes

    buffer = Mapping.from_address(base)
    # When the interpreter ends, the kernel unmaps; tensors may still be in use then.
    weakref.finalize(buffer, core.tutti_segment_close, segment).atexit = False
    return buffer


def _token(core: Any, segment: Any) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(core.tutti_segment_base(segment))


def _strangers(rank: int, other: int, cards: list[dict[str, Any]], why: str) -> str:
    mine, theirs = cards[rank], cards[other]
    if mine["boot"] != theirs["boot"]:
        return (
            f"a heap in shared memory needs all ranks on one host: rank {rank} is on "
            f"{mine['host']}, rank {other} on {theirs['host']}: make a group per host "
            "(dist.new_subgroups) and a heap per group"
        )
    return (
        f"rank {rank} cannot open the memory of rank {other} (process {theirs['pid']} on "
        f"{theirs['host']}): {why}: ranks in containers need one process namespace and one user"
    )
