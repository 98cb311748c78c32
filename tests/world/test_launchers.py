"""Which launcher started this process, from its environment; Slurm's compressed lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.world.errors import UsageError
from tutti.world.launchers import (
    expand_hosts,
    expand_tasks_per_node,
    identify,
    without_launcher_variables,
)

PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **PLAIN,
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "1739390977",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}


ON_SEVERAL_HOSTS = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPIRUN_URI = "17393.0;tcp://10.0.0.5,10.1.0.5:58983;tcp6://[fd00::2]:3890"
BATCH_SHELL = {k: v for k, v in SLURM.items() if not k.startswith("SLURM_STEP")}
ONE_TASK = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HOME": "/root"}, {"launcher": "python", "rank": 0, "size": 1, "local_size": 1}),
        (TORCHRUN, {"launcher": "torchrun", "rank": 1, "size": 4, "agent_store": True}),
        (TORCHRUN, {"local_rank": 1, "local_size": 2, "node": 0, "nodes": 2}),
        (TORCHRUN, {"master_host": "n1", "master_port": 29500}),
        # The four required variables are enough.
        (PLAIN, {"launcher": "environment", "rank": 1, "size": 4, "local_rank": None}),
        (OPENMPI, {"launcher": "openmpi", "rank": 2, "local_rank": 2, "local_size": 3}),
        (OPENMPI, {"master_host": "127.0.0.1", "master_port": None}),
        # On several hosts: the host of mpirun, or the first node of a Slurm job, because mpirun
        # itself may run elsewhere: salloc's shell is on the login node.
        ({**ON_SEVERAL_HOSTS, "OMPI_MCA_orte_hnp_uri": MPIRUN_URI}, {"master_host": "10.0.0.5"}),
        (
            {**ON_SEVERAL_HOSTS, "OMPI_MCA_orte_hnp_uri": MPIRUN_URI, "MASTER_ADDR": "n7"},
            {"master_host": "n7"},
        ),
        (
            {
                **ON_SEVERAL_HOSTS,
                "OMPI_MCA_orte_hnp_uri": MPIRUN_URI,
                "SLURM_JOB_NODELIST": "n[2-3]",
            },
            {"master_host": "n2"},
        ),
        (MPICH, {"launcher": "mpich", "rank": 2, "size": 3, "local_rank": 2}),
        (
            {**SLURM, **MPICH, "MPI_LOCALNRANKS": "1"},
            {"launcher": "mpich", "master_host": "n2", "job": "mpich-slurm-7-0"},
        ),
        ({**MPICH, "MPI_LOCALNRANKS": "1"}, {"job": ""}),  # no id that all hosts know
        (SLURM, {"launcher": "slurm", "rank": 3, "size": 4, "local_rank": 1, "local_size": 2}),
        # Not the job's first node, and not the host where srun was called.
        (SLURM, {"node": 1, "nodes": 2, "master_host": "n2"}),
        # The batch shell is a world of one rank; a step of one task is not a launcher, because
        # the commands of srun --pty bash start ranks, and several such steps may be numbered.
        ({**BATCH_SHELL, "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {"size": 1}),
        (ONE_TASK, {"launcher": "python"}),
        ({**ONE_TASK, **PLAIN}, {"rank": 1}),
        # One launcher inside another: orted runs as a step's task, so Slurm's rank is the daemon's.
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, {"launcher": "slurm"}),
        ({**SLURM, **TORCHRUN}, {"launcher": "torchrun"}),
        ({**SLURM, **OPENMPI}, {"launcher": "openmpi"}),
        ({**SLURM, **PLAIN, "RANK": "3"}, {"launcher": "environment"}),
    ],
)
def test_the_launcher_and_its_values_are_found(
    env: dict[str, str], expected: dict[str, object]
) -> None:
    found = identify(env)
    assert {name: getattr(found, name) for name in expected} == expected


def test_each_value_has_the_variable_that_gave_it() -> None:
    assert identify({}).reasons["rank"] == "default: no launcher found"
    assert identify(TORCHRUN).reasons["local_rank"] == "LOCAL_RANK"
    assert identify(SLURM).reasons["master"] == "SLURM_STEP_NODELIST"


@pytest.mark.parametrize("other", [OPENMPI, MPICH, SLURM])
def test_contradicting_launchers_are_both_named(other: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        identify({**other, **PLAIN, "WORLD_SIZE": "8"})
    message = str(caught.value)
    assert "RANK=1 and WORLD_SIZE=8" in message
    rank = next(name for name in other if name.endswith(("RANK", "PROCID")))
    assert f"{rank}={other[rank]}" in message and "unset" in message.lower()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 .* without MASTER_ADDR and MASTER_PORT"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "WORLD_SIZE=4 is set without RANK"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI_SIZE=4 is set without RANK"),
        ({"RANK": "3"}, "RANK=3 is set without WORLD_SIZE"),
    ],
)
def test_incomplete_variables_never_become_a_world_of_one_rank(
    env: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        identify(env)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK='x' must be an integer"),
        ({"RANK": "-1"}, "RANK='-1' must be an integer >= 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be at least 1"),
        ({"RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
    ],
)
def test_an_invalid_value_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        identify({**PLAIN, **change})


def test_an_invalid_node_list_is_named() -> None:
    with pytest.raises(UsageError, match=r"SLURM_STEP_NODELIST='n\[1-' cannot be parsed"):
        identify({**SLURM, "SLURM_STEP_NODELIST": "n[1-"})


def test_without_launcher_variables_removes_those_of_all_launchers() -> None:
    env = without_launcher_variables(
        {**SLURM, **OPENMPI, **TORCHRUN, "PATH": "/bin", "NCCL_DEBUG": "INFO"}
    )
    assert identify(env).launcher == "python"
    assert env["PATH"] == "/bin" and env["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3-4],login", ["n1", "n3", "n4", "login"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("gpu-a[100].cluster,b", ["gpu-a100.cluster", "b"]),
    ],
)
def test_a_list_expands_to_its_hosts_in_order(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[1-", "n]1[", "n[1-2", "n[2-1]", "n[a-b]", "", "a,,b", "n[[1]]"]
)
def test_an_invalid_list_is_named_with_the_cure(text: str) -> None:
    with pytest.raises(UsageError, match=r"SLURM_STEP_NODELIST=.* cannot be parsed.*MASTER_ADDR"):
        expand_hosts(text, "SLURM_STEP_NODELIST")


@given(
    prefix=st.from_regex(r"[a-z][a-z0-9-]{0,4}[a-z]", fullmatch=True),
    numbers=st.lists(st.integers(0, 10**4), min_size=1, max_size=8, unique=True),
    width=st.integers(1, 6),
)
def test_any_padded_set_of_numbers_expands(prefix: str, numbers: list[int], width: int) -> None:
    names = [f"{prefix}{n:0{width}d}" for n in numbers]
    items = ",".join(f"{n:0{width}d}" for n in numbers)
    assert expand_hosts(f"{prefix}[{items}]") == names


def test_tasks_per_node_expand_to_one_count_per_node() -> None:
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks_per_node("4") == [4]
    with pytest.raises(UsageError, match="cannot be parsed at 'x'"):
        expand_tasks_per_node("2,x")
