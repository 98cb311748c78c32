"""The store that ranks meet at: where it listens, and what happens when its port is taken."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist

from tutti.world.addresses import free_port, port_candidates
from tutti.world.errors import UsageError
from tutti.world.launchers import Identity
from tutti.world.rendezvous import open_rendezvous

ONE_HOST = {"local_size": 2, "master_host": "127.0.0.1", "reasons": {"master": "test"}}
FIRST = Identity("test", rank=0, size=2, job="job-a", **ONE_HOST)
SECOND = Identity("test", rank=1, size=2, job="job-a", **ONE_HOST)


def test_the_store_listens_on_loopback_only_when_all_ranks_are_on_one_host() -> None:
    meeting = open_rendezvous(FIRST, timeout=10)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == meeting.port
    ]
    assert listening == ["127.0.0.1"]


def test_ranks_find_each_other_at_a_port_derived_from_the_job() -> None:
    host = open_rendezvous(FIRST, timeout=10)
    guest = open_rendezvous(SECOND, timeout=10)
    host.store.set("greeting", "hello")
    assert guest.store.get("greeting") == b"hello"
    assert host.port == guest.port and host.port in port_candidates("job-a")


def test_a_derived_port_that_is_taken_is_passed_over_by_all_ranks() -> None:
    first, second, *_ = port_candidates("job-a")
    with listener(first):
        host = open_rendezvous(FIRST, timeout=10)
        guest = open_rendezvous(SECOND, timeout=30)
        assert host.port == guest.port == second


def test_another_jobs_store_at_a_derived_port_is_not_mistaken_for_ours() -> None:
    first, second, *_ = port_candidates("job-a")
    stranger = open_rendezvous(replace(FIRST, job="job-b", master_port=first), timeout=10)
    host = open_rendezvous(FIRST, timeout=10)
    guest = open_rendezvous(SECOND, timeout=10)
    assert stranger.port == first and host.port == guest.port == second


def test_a_given_port_that_is_in_use_is_named_with_a_free_one() -> None:
    port = free_port()
    with (
        listener(port),
        pytest.raises(UsageError, match=f"port {port} is in use on .* MASTER_PORT"),
    ):
        open_rendezvous(replace(FIRST, master_port=port), timeout=10)


def test_a_master_that_does_not_resolve_is_named() -> None:
    lost = replace(SECOND, master_host="no-such-host.invalid")
    with pytest.raises(UsageError, match=r"'no-such-host.invalid' \(from test\) does not resolve"):
        open_rendezvous(lost, timeout=10)


def test_a_master_on_another_host_is_refused_by_rank_zero_at_once() -> None:
    # 192.0.2.0/24 is set aside for documentation: nobody has it.
    elsewhere = replace(FIRST, master_host="192.0.2.77")
    with pytest.raises(UsageError, match=r"192\.0\.2\.77.*is another host's: set MASTER_ADDR"):
        open_rendezvous(elsewhere, timeout=10)


def test_a_rank_zero_that_never_comes_is_a_timeout_with_its_address() -> None:
    with pytest.raises(UsageError, match=r"rank 1 on .* could not reach rank 0 at 127\.0\.0\.1"):
        open_rendezvous(SECOND, timeout=0.5)


def test_several_hosts_without_a_master_are_told_how_to_give_one() -> None:
    with pytest.raises(UsageError, match="-genv MASTER_ADDR HOST -genv MASTER_PORT 29500"):
        open_rendezvous(Identity("mpich", rank=1, size=4, local_size=2), timeout=1)
    with pytest.raises(UsageError, match="give all ranks MASTER_PORT, too"):
        open_rendezvous(
            Identity("mpich", rank=1, size=4, local_size=2, master_host="n1"), timeout=1
        )


def test_loopback_as_the_master_of_several_hosts_is_refused_at_once() -> None:
    wrong = replace(FIRST, size=4, master_host="localhost")
    with pytest.raises(UsageError, match="MASTER_ADDR=localhost is this host only, but 2 of 4"):
        open_rendezvous(wrong, timeout=10)


def test_something_silent_at_the_given_port_is_no_store_and_ends_with_the_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(UsageError, match="could not reach rank 0"):
            open_rendezvous(replace(SECOND, master_port=port), timeout=2)


def test_a_world_of_one_opens_no_port() -> None:
    meeting = open_rendezvous(Identity("python", rank=0, size=1), timeout=1)
    assert meeting.port == 0 and isinstance(meeting.store, dist.HashStore)


@contextmanager
def listener(port: int) -> Iterator[None]:
    """Something that listens, and hangs up on everybody who calls."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        server.settimeout(0.1)
        over = threading.Event()

        def hang_up() -> None:
            while not over.is_set():
                try:
                    server.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
