"""Placement of ranks on machines that are described by a roster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.machine.cpu_numa import parse_cpu_list
from tutti.world.errors import UsageError
from tutti.world.placement import cpus_for, place
from tutti.world.rendezvous import RankInfo


def info(
    rank: int,
    host: str = "n1",
    gpus: tuple[str, ...] = (),
    cpus: str = "0-7",
    local_rank: int | None = None,
    boot: str = "",
) -> RankInfo:
    return RankInfo(
        rank=rank,
        host=host,
        machine=f"{host}/{boot or host + '-boot'}/net:[1]",
        address="",
        liveness_port=0,
        local_rank=local_rank,
        local_size=None,
        node=None,
        gpus=gpus,
        cpus=cpus,
        versions={},
        shm=False,
        token=str(rank),
    )


def test_local_ranks_are_counted_by_machine() -> None:
    places = place([info(0, "a"), info(1, "b"), info(2, "a"), info(3, "b")])
    assert [(p.node, p.local_rank, p.local_size) for p in places] == [
        (0, 0, 2),
        (1, 0, 2),
        (0, 1, 2),
        (1, 1, 2),
    ]
    assert all(p.gpu is None for p in places)


def test_each_rank_takes_its_own_gpu_in_turn() -> None:
    four = ("A", "B", "C", "D")
    assert [p.gpu for p in place([info(r, gpus=four) for r in range(4)])] == [0, 1, 2, 3]


def test_if_each_task_has_one_visible_gpu_each_rank_uses_device_zero() -> None:
    places = place([info(r, gpus=(f"GPU{r}",)) for r in range(4)])
    assert [p.gpu for p in places] == [0, 0, 0, 0]
    assert [p.ranks_on_gpu for p in places] == [1, 1, 1, 1]


def test_more_ranks_than_gpus_are_refused_with_numbers_and_cures() -> None:
    with pytest.raises(UsageError) as caught:
        place([info(r, gpus=("A", "B")) for r in range(4)])
    message = str(caught.value)
    assert "n1 has 4 ranks, but 2 GPUs × 1 per GPU = 2." in message
    assert "--ranks-per-gpu 2" in message and "--device cpu" in message


def test_neighbouring_ranks_share_a_gpu_if_requested() -> None:
    places = place([info(r, gpus=("A", "B")) for r in range(4)], ranks_per_gpu=2)
    assert [p.gpu for p in places] == [0, 0, 1, 1]
    assert [p.ranks_on_gpu for p in places] == [2, 2, 2, 2]


def test_two_containers_with_the_same_gpu_are_refused() -> None:
    one = info(0, host="c1", gpus=("A",), boot="same")
    other = info(1, host="c2", gpus=("A",), boot="same")
    with pytest.raises(UsageError, match="ranks 0, 1 would use the same GPU A"):
        place([one, other])
    assert [p.ranks_on_gpu for p in place([one, other], ranks_per_gpu=2)] == [2, 2]


def test_a_rank_without_a_gpu_among_others_with_one_is_named() -> None:
    with pytest.raises(UsageError, match=r"rank 1 on n2 has no visible GPU \(1 of 2"):
        place([info(0, gpus=("A",)), info(1, "n2")])


def test_device_cpu_ignores_gpus() -> None:
    assert place([info(r, gpus=("A",)) for r in range(4)], device="cpu")[3].gpu is None


@given(ranks=st.integers(1, 16), gpus=st.integers(1, 8), per_gpu=st.integers(1, 4))
def test_no_gpu_has_more_ranks_than_requested(ranks: int, gpus: int, per_gpu: int) -> None:
    ranks_info = [info(r, gpus=tuple(f"G{g}" for g in range(gpus))) for r in range(ranks)]
    if ranks > gpus * per_gpu:
        with pytest.raises(UsageError):
            place(ranks_info, ranks_per_gpu=per_gpu)
        return
    chosen = [p.gpu for p in place(ranks_info, ranks_per_gpu=per_gpu)]
    assert max(chosen.count(gpu) for gpu in chosen) <= per_gpu


@given(ranks=st.integers(1, 40), cpus=st.integers(1, 16), nodes=st.integers(1, 4))
def test_cpu_ranks_get_separate_cpus_of_one_numa_node_if_there_are_enough(
    ranks: int, cpus: int, nodes: int
) -> None:
    numa = {node: tuple(range(node * cpus, (node + 1) * cpus)) for node in range(nodes)}
    ranks_info = [info(r, cpus=f"0-{nodes * cpus - 1}") for r in range(ranks)]
    chosen = [cpus_for(ranks_info, r, numa) for r in range(ranks)]
    if ranks == 1 or ranks < nodes or (nodes == 1 and ranks > cpus):
        assert chosen == [None] * ranks
        return
    sets = [set(parse_cpu_list(text or "")) for text in chosen]
    assert all(any(s and s <= set(numa[node]) for node in numa) for s in sets)
    if ranks <= nodes * cpus // 2:  # blocks are equal to one rank: surely enough in every node
        assert sum(map(len, sets)) == len(set().union(*sets)) == nodes * cpus


def test_two_ranks_on_two_cpus_have_one_each() -> None:
    ranks_info = [info(r, cpus="0-1") for r in range(2)]
    assert [cpus_for(ranks_info, r, {0: (0, 1)}) for r in range(2)] == ["0", "1"]


def test_cpu_ranks_are_distributed_over_numa_nodes_in_blocks() -> None:
    numa = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    ranks_info = [info(r) for r in range(4)]
    assert [cpus_for(ranks_info, r, numa) for r in range(4)] == ["0-1", "2-3", "4-5", "6-7"]


def test_fewer_ranks_than_numa_nodes_use_all_of_them() -> None:
    numa = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    assert cpus_for([info(0)], 0, numa) is None


def test_cpus_that_the_launcher_chose_are_kept() -> None:
    numa = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    ranks_info = [info(0, cpus="0-1"), info(1, cpus="4-5")]
    assert [cpus_for(ranks_info, r, numa) for r in range(2)] == [None, None]
