"""Rendezvous: the addresses and ports of the store, and the exchange of rank information."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tutti.world.errors import RanksDiffer, UsageError
from tutti.world.launchers import Identity, free_port, port_candidates
from tutti.world.rendezvous import (
    RankInfo,
    Roster,
    describe_rank,
    exchange_rank_info,
    open_rendezvous,
    refuse_different_versions,
)

ONE_HOST = {"local_size": 2, "master_host": "127.0.0.1", "reasons": {"master": "test"}}
FIRST = Identity("test", rank=0, size=2, job="job-a", **ONE_HOST)
SECOND = Identity("test", rank=1, size=2, job="job-a", **ONE_HOST)


def test_the_store_listens_on_loopback_only_when_all_ranks_are_on_one_host() -> None:
    rendezvous = open_rendezvous(FIRST, timeout=10)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == rendezvous.port
    ]
    assert listening == ["127.0.0.1"]


def test_ranks_connect_at_a_port_derived_from_the_job() -> None:
    host = open_rendezvous(FIRST, timeout=10)
    guest = open_rendezvous(SECOND, timeout=10)
    host.store.set("greeting", "hello")
    assert guest.store.get("greeting") == b"hello"
    assert host.port == guest.port and host.port in port_candidates("job-a")


def test_a_derived_port_in_use_is_skipped_by_all_ranks() -> None:
    first, second, *_ = port_candidates("job-a")
    with listener(first):
        host = open_rendezvous(FIRST, timeout=10)
        guest = open_rendezvous(SECOND, timeout=30)
        assert host.port == guest.port == second


def test_another_jobs_store_at_a_derived_port_is_skipped() -> None:
    first, second, *_ = port_candidates("job-a")
    other = open_rendezvous(replace(FIRST, job="job-b", master_port=first), timeout=10)
    host = open_rendezvous(FIRST, timeout=10)
    guest = open_rendezvous(SECOND, timeout=10)
    assert other.port == first and host.port == guest.port == second


def test_a_master_port_in_use_is_named_with_a_free_port() -> None:
    port = free_port()
    with (
        listener(port),
        pytest.raises(UsageError, match=f"port {port} is in use on .* MASTER_PORT"),
    ):
        open_rendezvous(replace(FIRST, master_port=port), timeout=10)


MPICH = Identity("mpich", rank=1, size=4, local_size=2)


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (
            replace(SECOND, master_host="no-such-host.invalid"),
            r"'no-such-host.invalid' \(from test\) cannot be resolved",
        ),
        # 192.0.2.0/24 is reserved for documentation.
        (
            replace(FIRST, master_host="192.0.2.77"),
            r"192\.0\.2\.77.*belongs to another host. Set MASTER_ADDR",
        ),
        (SECOND, r"rank 1 on .* could not reach rank 0 at 127\.0\.0\.1"),
        (MPICH, "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500"),
        (replace(MPICH, master_host="n1"), "Set MASTER_PORT for all ranks"),
        (
            replace(FIRST, size=4, master_host="localhost"),
            "MASTER_ADDR=localhost is a loopback address, but 2 of 4",
        ),
    ],
)
def test_a_master_that_cannot_be_reached_is_named_with_the_cure(
    identity: Identity, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_rendezvous(identity, timeout=0.5)


def test_a_process_that_does_not_answer_at_the_master_port_causes_a_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(UsageError, match="could not reach rank 0"):
            open_rendezvous(replace(SECOND, master_port=port), timeout=2)


def test_a_world_of_one_opens_no_port() -> None:
    rendezvous = open_rendezvous(Identity("python", rank=0, size=1), timeout=1)
    assert rendezvous.port == 0 and isinstance(rendezvous.store, dist.HashStore)


@contextmanager
def listener(port: int) -> Iterator[None]:
    """Return a server that closes every connection."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        server.settimeout(0.1)
        over = threading.Event()

        def close_connections() -> None:
            while not over.is_set():
                try:
                    server.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=close_connections)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def info(rank: int, size: int) -> RankInfo:
    return describe_rank(Identity("test", rank, size), "127.0.0.1", ())


def exchange_all(store: dist.Store, infos: list[RankInfo], timeout: float = 10) -> list[Any]:
    """Exchange the information of all ranks, in threads. Return each result or error."""
    results: list[Any] = [None] * len(infos)

    def be(position: int) -> None:
        try:
            results[position] = exchange_rank_info(store, infos[position], len(infos), timeout)
        except Exception as error:
            results[position] = error

    threads = [threading.Thread(target=be, args=[n]) for n in range(len(infos))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_get_the_same_roster_in_rank_order() -> None:
    rosters = exchange_all(dist.HashStore(), [info(r, 4) for r in range(4)])
    assert all(roster == rosters[0] for roster in rosters)
    assert [a.rank for a in rosters[0].ranks] == [0, 1, 2, 3]


def test_entries_from_before_a_restart_are_ignored() -> None:
    store = dist.HashStore()  # torchrun's agent keeps its store over restarts
    before = exchange_all(store, [info(r, 3) for r in range(3)])
    restarted = [info(r, 3) for r in range(3)]
    after = exchange_all(store, restarted)
    assert all(isinstance(roster, Roster) for roster in after)
    assert after[0].start_id != before[0].start_id
    assert [a.token for a in after[0].ranks] == [a.token for a in restarted]


def test_a_rank_that_starts_late_after_a_restart_is_awaited() -> None:
    store = dist.HashStore()
    exchange_all(store, [info(r, 2) for r in range(2)])
    restarted = [info(r, 2) for r in range(2)]
    rosters: dict[int, Roster] = {}
    leader = threading.Thread(
        target=lambda: rosters.update({0: exchange_rank_info(store, restarted[0], 2, 20)})
    )
    leader.start()
    leader.join(timeout=1.0)  # rank 0 has published a list with the old entry of rank 1
    assert leader.is_alive()
    rosters[1] = exchange_rank_info(store, restarted[1], 2, 20)
    leader.join()
    assert rosters[0] == rosters[1] and rosters[0].ranks[1].token == restarted[1].token


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(UsageError, match="rank 1, 2 of 3 did not reach the rendezvous"):
        exchange_rank_info(dist.HashStore(), info(0, 3), 3, timeout=0.3)


def test_a_rank_with_another_version_is_named() -> None:
    infos = [info(r, 3) for r in range(3)]
    infos[2] = replace(infos[2], versions={**infos[2].versions, "torch": "2.11.0"})
    with pytest.raises(
        RanksDiffer, match=r"of torch: rank 2 on .* has 2.11.0, but the other 2 ranks have"
    ):
        refuse_different_versions(infos)
