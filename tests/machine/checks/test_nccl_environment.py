"""Misspelt, renamed and invalid variables are reported with a cure; correct ones are not."""

from dataclasses import replace

import pytest
from check_cases import HEALTHY, PLAIN, change, problems_of, with_variables

from tutti.machine.checks.cluster import RankObservation
from tutti.machine.checks.finding import fix_commands
from tutti.machine.checks.nccl_environment import KNOWN, RENAMED, closest_known


@pytest.mark.parametrize(
    ("name", "correct"),
    [
        ("NCCL_SOCKET_IFNAM", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SOKCET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_IB_HAC", "NCCL_IB_HCA"),
        ("NCLL_DEBUG", "NCCL_DEBUG"),
        ("nccl_debug", "NCCL_DEBUG"),
        ("GLOO_SOCKET_IFACE", "GLOO_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFNAMES", "GLOO_SOCKET_IFNAME"),
        ("TORCH_NCCL_BLOCKING_WIAT", "TORCH_NCCL_BLOCKING_WAIT"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("OMP_NUM_THREADS", None),
        ("NCCL_OFI_PROTOCOL", None),  # a variable of a plugin
        ("TORCH_CUDA_ARCH_LIST", None),
        ("NCCL_MY_OWN_THING", None),
    ],
)
def test_misspelt_names_are_recognised_and_other_names_are_not(
    name: str, correct: str | None
) -> None:
    assert closest_known(name) == correct


def test_no_known_name_is_a_misspelling_of_another() -> None:
    assert [name for name in sorted(KNOWN | set(RENAMED)) if closest_known(name)] == []


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("NCCL_P2P_DISABLE", "1", "env.switched_off"),
        ("NCCL_SHM_DISABLE", "1", "env.switched_off"),
        ("NCCL_IB_DISABLE", "1", "env.switched_off"),
        ("NCCL_NVLS_ENABLE", "0", "env.switched_off"),
        ("NCCL_CUMEM_ENABLE", "0", "env.switched_off"),
        ("NCCL_PROTO", "LL128", "env.pinned"),
        ("NCCL_MIN_NCHANNELS", "16", "env.pinned"),
        ("NCCL_BUFFSIZE", "8388608", "env.pinned"),
        ("NCCL_DEBUG", "INFO", "env.debugging"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "env.debugging"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "env.debugging"),
        ("NCCL_DEBUG", "LOUD", "env.values"),
        ("NCCL_P2P_DISABLE", "true", "env.values"),
        ("NCCL_IB_TIMEOUT", "5", "env.values"),
        ("NCCL_IB_RETRY_CNT", "1", "env.values"),
        ("NCCL_IB_HCA", '"mlx5_0"', "env.values"),
        ("CUDA_DEVICE_ORDER", "PCI", "env.values"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "env.renamed"),
        ("NCCL_MIN_NRINGS", "4", "env.renamed"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", "env.renamed"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", "env.renamed"),
        ("OMP_NUM_THREADS", "many", "env.threads"),
        ("NCCL_SOCKET_IFNAME", "lo", "network.ifname"),
        ("NCCL_SOCKET_IFNAME", "=eth9", "network.ifname"),
        ("GLOO_SOCKET_IFNAME", "eth", "network.ifname"),  # gloo accepts only complete names
        ("NCCL_IB_HCA", "mlx4", "rdma.hca"),
        ("CUDA_VISIBLE_DEVICES", "0,0", "gpus.visible"),
        ("CUDA_VISIBLE_DEVICES", "", "gpus.visible"),
    ],
)
def test_a_wrong_variable_is_reported_once_with_a_cure(name: str, value: str, check: str) -> None:
    machine = HEALTHY if check in ("rdma.hca", "gpus.visible") else PLAIN
    found = [f for f in problems_of(with_variables(machine, **{name: value})) if f.id == check]
    assert len(found) == 1
    assert name in found[0].observed and found[0].cure


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_DEBUG": "WARN"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p"},
        {"NCCL_SOCKET_IFNAME": "eth"},  # NCCL accepts name prefixes
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"NCCL_P2P_DISABLE": "0"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        {"TORCH_FR_BUFFER_SIZE": "2000"},
        {"OMP_NUM_THREADS": "2"},
        {"NCCL_IB_TIMEOUT": "22"},
        # Set by tutti for ranks that share a GPU.
        {"TUTTI_RANKS_PER_GPU": "2", "NCCL_SOCKET_IFNAME": "lo", "NCCL_HOSTID": "a-0"},
    ],
)
def test_correct_variables_are_not_reported(variables: dict[str, str]) -> None:
    assert problems_of(with_variables(PLAIN, **variables)) == []


def test_loopback_is_correct_if_all_ranks_are_on_one_host() -> None:
    machine = with_variables(PLAIN, NCCL_SOCKET_IFNAME="lo")
    ranks = tuple(RankObservation(rank, 0, machine) for rank in range(2))
    assert "network.ifname" not in {each.id for each in problems_of(machine, ranks=ranks)}


def test_settings_in_nccl_conf_are_checked_like_the_environment() -> None:
    machine = replace(PLAIN, nccl_conf={"/etc/nccl.conf": {"NCCL_IB_DISABLE": "1"}})
    (found,) = problems_of(machine)
    assert found.id == "env.switched_off" and "nccl.conf" in found.observed


def test_each_fix_command_is_printed_once() -> None:
    machine = with_variables(PLAIN, NCCL_P2P_DISABLE="1", NCCL_DEBG="WARN")
    lines = list(fix_commands(problems_of(machine)))
    assert "unset NCCL_P2P_DISABLE" in lines
    assert "export NCCL_DEBUG=WARN" in lines
    commands = [line for line in lines if not line.startswith("#")]
    assert len(commands) == len(set(commands))


def test_threads_are_compared_with_the_cpus_of_all_ranks() -> None:
    machine = with_variables(HEALTHY, OMP_NUM_THREADS="14")
    masks = [f"{14 * rank}-{14 * rank + 13}" for rank in range(8)]
    bound = [change(machine, cpus__allowed=mask) for mask in masks]
    ranks = tuple(RankObservation(rank, 0, each) for rank, each in enumerate(bound))
    assert "env.threads" not in {each.id for each in problems_of(bound[0], ranks=ranks)}
    on_same_cpus = tuple(RankObservation(rank, 0, bound[0]) for rank in range(8))
    assert "env.threads" in {each.id for each in problems_of(bound[0], ranks=on_same_cpus)}
