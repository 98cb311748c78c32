"""Payloads are exact, shards fit together, and pinned ranks share no CPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.bench.payload import DTYPES, payload
from tutti.bench.pinning import share_of
from tutti.measure.bus_bandwidth import OPERATIONS, uneven_shards


@given(st.integers(1, 64), st.integers(1, 64))
def test_pinned_ranks_share_no_cpu_unless_they_outnumber_them(cpus: int, ranks: int) -> None:
    shares = [share_of(tuple(range(cpus)), rank, ranks) for rank in range(ranks)]
    used = [cpu for share in shares for cpu in share]
    assert all(shares) and set(used) == set(range(min(cpus, max(ranks, cpus))))
    if ranks <= cpus:
        assert len(used) == len(set(used))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_payloads_are_exact_in_any_order_and_never_zero(dtype: torch.dtype, ranks: int) -> None:
    parts = [payload(OPERATIONS["all_reduce"], 9000, dtype, rank, ranks) for rank in range(ranks)]
    forwards, backwards = parts[0].sent.clone(), parts[-1].sent.clone()
    for part in parts[1:]:
        forwards += part.sent
    for part in reversed(parts[:-1]):
        backwards += part.sent
    assert torch.equal(forwards, backwards)
    assert parts[0].wrong_in(forwards) == 0
    assert parts[0].wrong_in(torch.zeros_like(forwards)) == 9000
    if ranks > 1:
        assert not torch.equal(parts[0].sent, parts[1].sent)


@pytest.mark.parametrize("count", [1, 3, 8191, 10000])
def test_shares_fit_together(count: int) -> None:
    ranks, kind = 3, torch.float32
    whole = [payload(OPERATIONS["reduce_scatter"], count, kind, rank, ranks) for rank in range(3)]
    total = sum(part.sent for part in whole)
    assert torch.equal(torch.cat([part.expected for part in whole]), total)
    turned = [payload(OPERATIONS["all_to_all"], count, kind, rank, ranks) for rank in range(3)]
    for receiver in range(ranks):
        pieces = [turned[sender].sent.chunk(ranks)[receiver] for sender in range(ranks)]
        assert torch.equal(turned[receiver].expected, torch.cat(pieces))


@pytest.mark.parametrize("count", [1, 3, 8191])
def test_uneven_shares_fit_together_and_differ(count: int) -> None:
    ranks, kind = 3, torch.float32
    shares = uneven_shards(count, ranks)
    assert sum(shares) == count * ranks and (len(set(shares)) == ranks or count == 1)
    gathered = [payload(OPERATIONS["all_gather_uneven"], count, kind, r, ranks) for r in range(3)]
    assert [len(part.sent) for part in gathered] == shares
    assert torch.equal(gathered[1].expected, torch.cat([part.sent for part in gathered]))
    turned = [payload(OPERATIONS["all_to_all_uneven"], count, kind, r, ranks) for r in range(3)]
    for receiver in range(ranks):
        pieces = []
        for sender, part in enumerate(turned):
            splits = [shares[(sender + each) % ranks] for each in range(ranks)]
            pieces.append(part.sent.split(splits)[receiver])
        assert torch.equal(turned[receiver].expected, torch.cat(pieces))


def test_wrong_elements_are_counted_one_by_one() -> None:
    part = payload(OPERATIONS["all_reduce"], 100, torch.float32, 0, 2)
    received = part.expected.clone()
    received[7] += 1
    received[9] = float("nan")
    assert part.wrong_in(received) == 2
