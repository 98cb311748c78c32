"""Ranks call different operations, are late or pass wrong arguments: errors with the numbers."""

import re
import time

import numpy as np
import pytest

from shm_ranks import Group, call, errors, outcomes, results
from tutti.comm.shm import native
from tutti.comm.shm.native import core


def differ(g: Group, how: str) -> None:
    call(g, native.BARRIER, 0, -1)
    uneven, where = g.rank == 1, f"train.py:{10 + g.rank} in step"
    x = np.zeros(512 if uneven and how == "bytes" else 1024, np.float32)
    settings = {"dtype": native.F32, "reduce": native.SUM, "where": where}
    if how == "dtype" and uneven:
        settings["dtype"] = native.I32
    if how == "reduce" and uneven:
        settings["reduce"] = native.MAX
    if how == "kind" and uneven:
        g.run(native.BARRIER, where=where)
    elif how == "root":
        call(g, native.BROADCAST, 10, g.rank % 2, where=where)
    elif how == "sizes":
        parts = [np.zeros(3 + (uneven and p == 0)) for p in range(g.size)]
        g.run(native.ALL_TO_ALL, parts, [np.zeros(3) for _ in parts], where=where)
    else:
        g.run(native.ALL_REDUCE, [x], [x], **settings)
    g.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "bytes",
            "operation 2 of group default differs between ranks: rank {me} called all_reduce "
            r"\(float32, sum, \d+ bytes\) at train.py:1{me} in step, rank",
        ),
        ("dtype", r"rank 1 called all_reduce \(int32, sum, 4096 bytes\) at train.py:11 in step"),
        ("reduce", r"rank 1 called all_reduce \(float32, max, 4096 bytes\) at train.py:11 in step"),
        ("kind", "rank 1 called barrier at train.py:11 in step"),
        ("root", r"rank 1 called broadcast \(float32, 40 bytes, root 1\) at train.py:11 in step"),
        ("sizes", "rank 1 sends 32 bytes to rank 0, which expects 24"),
    ],
)
def test_given_ranks_that_differ_then_every_error_names_ranks_operations_and_lines(
    how: str, message: str
) -> None:
    got = errors(differ, 3, how)
    assert [name for name, _ in got] == ["ShmRanksDiffer"] * 3
    for rank, (_, text) in enumerate(got):
        assert re.search(message.format(me=rank), text), text


def be_late(g: Group) -> tuple[str, str] | None:
    g.barrier()
    if g.rank < 2:
        with pytest.raises(native.ShmTimeout) as first:
            call(g, native.ALL_REDUCE, 1024, -1, timeout=0.3)
        began = time.monotonic()
        with pytest.raises(native.ShmTimeout) as second:
            call(g, native.BARRIER, 0, -1, timeout=30)
        assert time.monotonic() - began < 5, "a broken group fails at once"
        return str(first.value), str(second.value)
    core().tutti_note_location(f"train.py:{80 + g.rank} in step".encode())
    time.sleep(0.8)
    return None


def test_given_late_ranks_at_the_timeout_then_the_error_names_them_and_their_locations() -> None:
    got = results(be_late, 4)
    for rank in (0, 1):
        text, again = got[rank]
        assert again == f"{text}: the group cannot be used any more"
        assert re.search(
            r"all_reduce 2 of group default \(float32, 4096 bytes\) timed out after 0\.3 s on "
            r"rank \d: waiting for rank 2 \(pid \d+: last operation 1 barrier, done \d\.\d s ago; "
            r"now at train\.py:82 in step, seen \d\.\d s ago\) and rank 3 \(pid \d+: ",
            text,
        ), text


def message_sizes(g: Group) -> None:
    x = np.zeros(10)
    if g.rank == 0:
        g.run(native.SEND, [x[:5]], peer=1, tag=7)
    else:
        g.run(native.RECV, [], [x], peer=0, tag=7)
    g.barrier()


def test_given_a_message_of_another_size_then_both_sizes_are_named() -> None:
    for name, text in errors(message_sizes, 2):
        assert name == "ShmRanksDiffer"
        assert "80 bytes from rank 0 (tag 7), which sent 40 bytes" in text


def wait_for_message(g: Group) -> None:
    g.barrier()
    if g.rank == 1:
        g.run(native.RECV, [], [np.zeros(4)], peer=-1, tag=3, timeout=0.2)
    else:
        time.sleep(0.5)


def test_given_no_message_at_the_timeout_then_the_recv_fails_with_that_reason() -> None:
    assert errors(wait_for_message, 2) == [
        ("", ""),
        (
            "ShmTimeout",
            "recv 1 of group default (tag 3, 32 bytes) timed out after 0.2 s on rank 1: waiting "
            "for any rank",
        ),
    ]


def bad_arguments(g: Group) -> None:
    x = np.zeros(10, np.float32)
    for message, arguments in {
        "root 7 is not a rank of group default": (native.BROADCAST, [x], [], 7),
        "takes 1 input parts and 2 output parts, got 1 and 1": (native.ALL_GATHER, [x], [x], -1),
        "itself 40 bytes but receives 20": (native.ALL_REDUCE, [x], [x[:5]], -1),
    }.items():
        kind, ins, outs, root = arguments
        with pytest.raises(ValueError, match=message):
            g.run(kind, ins, outs, root=root, dtype=native.F32)
    with pytest.raises(ValueError, match="avg of int32 is not defined"):
        g.run(native.ALL_REDUCE, [x], [x], dtype=native.I32, reduce=native.AVG)
    g.barrier()  # a refused call leaves the group as it was


def test_given_bad_arguments_then_the_call_is_refused_with_the_numbers() -> None:
    results(bad_arguments, 2)


def test_given_a_group_that_is_not_connected_then_an_operation_fails_with_that_reason() -> None:
    handle = core().tutti_group_create(b"alone", 0, 2, 0, 1)
    with pytest.raises(ValueError, match="connected to only 1 of 2 ranks"):
        Group(handle, 0, 2).barrier()
    core().tutti_group_close(handle)
    assert outcomes(lambda g: None, 1) == [("result", None)]
