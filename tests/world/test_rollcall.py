"""The roll call, with threads as ranks on one store: order, restarts, absentees, versions."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.launchers import Identity
from tutti.world.rendezvous import (
    RankInfo,
    Roster,
    describe_rank,
    exchange_rank_info,
    refuse_different_versions,
)


def answer(rank: int, size: int) -> RankInfo:
    return describe_rank(Identity("test", rank, size), "127.0.0.1", ())


def call_all(store: dist.Store, answers: list[RankInfo], timeout: float = 10) -> list[Any]:
    """Every rank calls the roll in a thread of its own; returns what each got or raised."""
    results: list[Any] = [None] * len(answers)

    def be(position: int) -> None:
        try:
            results[position] = exchange_rank_info(store, answers[position], len(answers), timeout)
        except Exception as error:
            results[position] = error

    threads = [threading.Thread(target=be, args=[n]) for n in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_get_the_same_roll_in_rank_order() -> None:
    rolls = call_all(dist.HashStore(), [answer(r, 4) for r in range(4)])
    assert all(roll == rolls[0] for roll in rolls)
    assert [a.rank for a in rolls[0].ranks] == [0, 1, 2, 3]


def test_after_a_restart_the_answers_of_the_dead_do_not_count() -> None:
    store = dist.HashStore()  # torchrun's agent keeps its store over restarts
    before = call_all(store, [answer(r, 3) for r in range(3)])
    reborn = [answer(r, 3) for r in range(3)]
    after = call_all(store, reborn)
    assert all(isinstance(roll, Roster) for roll in after)
    assert after[0].start_id != before[0].start_id
    assert [a.token for a in after[0].ranks] == [a.token for a in reborn]


def test_a_rank_that_starts_late_after_a_restart_is_waited_for() -> None:
    store = dist.HashStore()
    call_all(store, [answer(r, 2) for r in range(2)])
    reborn = [answer(r, 2) for r in range(2)]
    rolls: dict[int, Roster] = {}
    leader = threading.Thread(
        target=lambda: rolls.update({0: exchange_rank_info(store, reborn[0], 2, 20)})
    )
    leader.start()
    leader.join(timeout=1.0)  # rank 0 has published a list with the dead rank 1 on it by now
    assert leader.is_alive()
    rolls[1] = exchange_rank_info(store, reborn[1], 2, 20)
    leader.join()
    assert rolls[0] == rolls[1] and rolls[0].ranks[1].token == reborn[1].token


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(UsageError, match="rank 1, 2 of 3 did not come to the roll call"):
        exchange_rank_info(dist.HashStore(), answer(0, 3), 3, timeout=0.3)


def test_a_rank_with_other_versions_is_the_odd_one_out() -> None:
    answers = [answer(r, 3) for r in range(3)]
    answers[2] = replace(answers[2], versions={**answers[2].versions, "torch": "2.11.0"})
    with pytest.raises(RanksDiffer, match=r"of torch: rank 2 on .* has 2.11.0, the other 2"):
        refuse_different_versions(answers)
