"""Where ranks belong, for machines we do not have: placement is a function of the roll alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.machine.cpu_numa import parse_cpu_list
from tutti.world.errors import UsageError
from tutti.world.placement import cpus_for, place
from tutti.world.rendezvous import RankInfo


def answer(
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


def test_ranks_are_counted_by_the_machine_they_are_really_on() -> None:
    places = place([answer(0, "a"), answer(1, "b"), answer(2, "a"), answer(3, "b")])
    assert [(p.node, p.local_rank, p.local_size) for p in places] == [
        (0, 0, 2),
        (1, 0, 2),
        (0, 1, 2),
        (1, 1, 2),
    ]
    assert all(p.gpu is None for p in places)


def test_each_rank_takes_its_own_gpu_in_turn() -> None:
    four = ("A", "B", "C", "D")
    assert [p.gpu for p in place([answer(r, gpus=four) for r in range(4)])] == [0, 1, 2, 3]


def test_a_scheduler_that_shows_each_task_one_gpu_gives_each_device_zero() -> None:
    places = place([answer(r, gpus=(f"GPU{r}",)) for r in range(4)])
    assert [p.gpu for p in places] == [0, 0, 0, 0]
    assert [p.ranks_on_gpu for p in places] == [1, 1, 1, 1]


def test_more_ranks_than_gpus_are_refused_with_the_equation_and_the_cures() -> None:
    with pytest.raises(UsageError) as caught:
        place([answer(r, gpus=("A", "B")) for r in range(4)])
    message = str(caught.value)
    assert "4 ranks on n1, but 2 GPUs × 1 per GPU = 2 places" in message
    assert "--ranks-per-gpu 2" in message and "--device cpu" in message


def test_neighbours_share_a_gpu_when_asked_to() -> None:
    places = place([answer(r, gpus=("A", "B")) for r in range(4)], ranks_per_gpu=2)
    assert [p.gpu for p in places] == [0, 0, 1, 1]
    assert [p.ranks_on_gpu for p in places] == [2, 2, 2, 2]


def test_two_containers_that_show_the_same_gpu_are_caught() -> None:
    one = answer(0, host="c1", gpus=("A",), boot="same")
    other = answer(1, host="c2", gpus=("A",), boot="same")
    with pytest.raises(UsageError, match="ranks 0, 1 would compute on the same GPU A"):
        place([one, other])
    assert [p.ranks_on_gpu for p in place([one, other], ranks_per_gpu=2)] == [2, 2]


def test_a_rank_without_a_gpu_among_others_with_one_is_named() -> None:
    with pytest.raises(UsageError, match=r"rank 1 on n2 sees no GPU \(1 of 2 ranks do not\)"):
        place([answer(0, gpus=("A",)), answer(1, "n2")])


def test_cpu_can_be_asked_for_where_there_are_gpus() -> None:
    assert place([answer(r, gpus=("A",)) for r in range(4)], device="cpu")[3].gpu is None


@given(ranks=st.integers(1, 16), gpus=st.integers(1, 8), per_gpu=st.integers(1, 4))
def test_no_gpu_ever_has_more_ranks_than_asked_for(ranks: int, gpus: int, per_gpu: int) -> None:
    answers = [answer(r, gpus=tuple(f"G{g}" for g in range(gpus))) for r in range(ranks)]
    if ranks > gpus * per_gpu:
        with pytest.raises(UsageError):
            place(answers, ranks_per_gpu=per_gpu)
        return
    chosen = [p.gpu for p in place(answers, ranks_per_gpu=per_gpu)]
    assert max(chosen.count(gpu) for gpu in chosen) <= per_gpu


@given(ranks=st.integers(1, 40), cpus=st.integers(1, 16), nodes=st.integers(1, 4))
def test_cpu_ranks_get_cpus_of_their_own_in_one_numa_node_while_there_are_enough(
    ranks: int, cpus: int, nodes: int
) -> None:
    numa = {node: tuple(range(node * cpus, (node + 1) * cpus)) for node in range(nodes)}
    answers = [answer(r, cpus=f"0-{nodes * cpus - 1}") for r in range(ranks)]
    chosen = [cpus_for(answers, r, numa) for r in range(ranks)]
    if ranks == 1 or ranks < nodes or (nodes == 1 and ranks > cpus):
        assert chosen == [None] * ranks
        return
    sets = [set(parse_cpu_list(text or "")) for text in chosen]
    assert all(any(s and s <= set(numa[node]) for node in numa) for s in sets)
    if ranks <= nodes * cpus // 2:  # blocks are equal to one rank: surely enough in every node
        assert sum(map(len, sets)) == len(set().union(*sets)) == nodes * cpus


def test_two_ranks_on_two_cpus_have_one_each() -> None:
    answers = [answer(r, cpus="0-1") for r in range(2)]
    assert [cpus_for(answers, r, {0: (0, 1)}) for r in range(2)] == ["0", "1"]


def test_cpu_ranks_are_dealt_out_to_numa_nodes_in_blocks() -> None:
    numa = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    answers = [answer(r) for r in range(4)]
    assert [cpus_for(answers, r, numa) for r in range(4)] == ["0-1", "2-3", "4-5", "6-7"]


def test_fewer_ranks_than_numa_nodes_use_all_of_them() -> None:
    numa = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    assert cpus_for([answer(0)], 0, numa) is None


def test_cpus_that_the_launcher_chose_are_kept() -> None:
    numa = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    answers = [answer(0, cpus="0-1"), answer(1, cpus="4-5")]
    assert [cpus_for(answers, r, numa) for r in range(2)] == [None, None]
