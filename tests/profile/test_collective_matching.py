"""Ranks with different clocks on hosts with direct, indirect or no common collectives."""

from pathlib import Path
from typing import Any

import pytest
from trace_events import all_reduce, step, write, x

from tutti.profile.explain import explain


def _pair_sum(ranks: str, start: float, end: float, sequence: int) -> dict[str, Any]:
    event = all_reduce(start, end, sequence)
    event["args"] |= {"Process Group Name": f"dp{ranks}", "Process Group Ranks": ranks}
    return event


def test_all_ranks_of_a_host_share_its_clock(tmp_path: Path) -> None:
    """dp2.tp2 on hosts n0 (ranks 0, 1) and n1 (2, 3): n1's clock is 5 ms ahead."""
    files = []
    for rank in range(4):
        ahead = 5000.0 if rank > 1 else 0.0
        # The ends on rank 2 are 40 µs late, those on rank 3 are not.
        end = 800.0 + 40 * (rank == 2)
        collective = _pair_sum(f"[{rank % 2}, {rank % 2 + 2}]", 600, end, 0)
        events = [step(0), x("kernel", "gemm", 0, 600), collective]
        events = [event | {"ts": event["ts"] + ahead} for event in events]
        files.append(write(tmp_path, rank, events, host=f"n{rank // 2}"))

    clocks = explain(files).clocks

    assert clocks[0].applied_s == clocks[1].applied_s == 0
    assert clocks[2].applied_s == clocks[3].applied_s == pytest.approx(-5.02e-3)


def test_two_hosts_without_common_collectives_are_compared_through_a_third_host(
    tmp_path: Path,
) -> None:
    """Only rank 1 has collectives with rank 0 and rank 2. The clocks are 0, 5 and 8 ms ahead."""
    events = [
        [step(0), _pair_sum("[0, 1]", 100, 200, 0)],
        [step(0), _pair_sum("[0, 1]", 100, 200, 0), _pair_sum("[1, 2]", 300, 400, 0)],
        [step(0), _pair_sum("[1, 2]", 300, 400, 0)],
        [step(0), x("kernel", "gemm", 0, 900)],
    ]
    files = []
    for rank, ahead in enumerate((0, 5000, 8000, 0)):
        moved = [event | {"ts": event["ts"] + ahead} for event in events[rank]]
        files.append(write(tmp_path, rank, moved, host=f"n{rank}"))

    explanation = explain(files)

    applied = [clock.applied_s for clock in explanation.clocks]
    assert applied == pytest.approx([0, -5e-3, -8e-3, 0])
    assert explanation.clocks[3].measured_s is None
    assert any("the clock of n3 cannot be compared" in note for note in explanation.notes)


def test_ranks_of_one_kernel_share_a_clock_even_if_one_always_leaves_late(tmp_path: Path) -> None:
    """Rank 1 leaves each collective 5 ms late, for example because it waits for a core."""
    files = []
    for rank in range(2):
        events = [step(0), _pair_sum("[0, 1]", 100, 300 + 5000 * rank, 0)]
        files.append(write(tmp_path, rank, events, tutti={"rank": rank, "kernel": "a"}))

    clocks = explain(files).clocks

    assert [clock.applied_s for clock in clocks] == [0, 0]
