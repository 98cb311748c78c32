"""Seconds of operators and collectives: limits, monotony, and published measurements."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.machine.hardware_catalogue import catalogue
from tutti.measure.collective_bandwidth import OPERATIONS
from tutti.plan.cluster_spec import known_accelerators, named_cluster, parse_gpus
from tutti.plan.collective_cost import CollectiveCost, MeasuredCollective
from tutti.plan.operator_cost import OperatorCost, default_rates
from tutti.plan.workload import Operation

sizes = st.integers(1, 2**14)


def matmul(m, n, k, dtype="bf16", batch=1):
    width = 2 if dtype == "bf16" else 4
    moved = float(width * batch * (m * k + k * n + m * n))
    return Operation("mm", "matmul", dtype, 2.0 * batch * m * n * k, moved, (batch, m, n, k))


def cost_of(cluster):
    return OperatorCost(cluster, default_rates(cluster))


def test_a_matrix_product_never_exceeds_the_efficiency_of_its_accelerator():
    for name in known_accelerators():
        cluster = named_cluster(name, 1)
        cost = cost_of(cluster)
        large = matmul(8192, 8192, 8192)
        share = large.flops / cost.seconds(large) / cluster.peak("bf16")
        assert 0.75 * cluster.gemm_efficiency < share <= cluster.gemm_efficiency
        small = matmul(256, 256, 256)
        assert small.flops / cost.seconds(small) / cluster.peak("bf16") < 0.1


@settings(max_examples=60, deadline=None)
@given(m=sizes, n=sizes, k=sizes, gain=st.floats(1.0, 4.0))
def test_faster_devices_are_never_slower(m, n, k, gain):
    cluster = named_cluster("H100", 1)
    operation = matmul(m, n, k)
    base = cost_of(cluster).seconds(operation)
    peaks = {name: value * gain for name, value in cluster.peak_flops.items()}
    assert cost_of(replace(cluster, peak_flops=peaks)).seconds(operation) <= base * (1 + 1e-9)
    wider = replace(cluster, memory_bandwidth=cluster.memory_bandwidth * gain)
    assert cost_of(wider).seconds(operation) <= base * (1 + 1e-9)
    assert cost_of(cluster).seconds(matmul(m, n, 2 * k)) >= base * (1 - 1e-9)


def test_one_more_tile_than_multiprocessors_starts_another_wave():
    cluster = named_cluster("A100", 1)  # 108 multiprocessors
    cost = cost_of(cluster)
    full = cost.seconds(matmul(256 * 9, 128 * 12, 8192))  # 108 tiles of 256 × 128
    more = cost.seconds(matmul(256 * 9, 128 * 13, 8192))  # 117 tiles
    assert more > 1.15 * full  # the FLOPs grow by 8 %


def test_elementwise_operators_are_limited_by_memory_bandwidth():
    cluster = named_cluster("H100", 1)
    rates = default_rates(cluster)
    operation = Operation("add", "memory", "bf16", 0.0, 3.35e9)
    expected = 1e-3 / rates.memory + rates.kernel_s
    assert OperatorCost(cluster, rates).seconds(operation) == pytest.approx(expected)
    # A curve from a calibration: half of the bytes of the curve's point are twice as fast.
    cached = replace(rates, memory_curve=((1e6, 4.0), (4e6, 2.0), (1.6e7, 1.0)))
    seconds = OperatorCost(cluster, cached).seconds(replace(operation, bytes=4e6))
    assert seconds == pytest.approx(4e6 / (3.35e12 * rates.memory * 2) + rates.kernel_s)


def test_depthwise_convolutions_do_not_reach_the_memory_bandwidth():
    cluster = named_cluster("A100", 1)
    dense = Operation("convolution", "convolution", "bf16", 1e12, 1e8)
    depthwise = Operation("convolution", "convolution", "bf16", 1e9, 1e8)
    cost = cost_of(cluster)
    assert cost.seconds(dense) > 1e12 / (312e12 * 0.8)
    assert cost.seconds(depthwise) > 2 * 1e8 / cluster.memory_bandwidth


# -- collectives -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    op=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "send_recv"]),
    size=st.integers(8, 2**30),
    members=st.sampled_from([1, 2, 4, 8]),
    nodes=st.sampled_from([1, 2, 4, 16]),
    gain=st.floats(1.0, 8.0),
)
def test_more_bandwidth_is_never_slower(op, size, members, nodes, gain):
    cluster = parse_gpus("128xH100")
    cost = CollectiveCost(cluster)
    base = cost.seconds(op, size, members, nodes)
    if members * nodes == 1:
        assert base == 0.0
        return
    assert base > 0
    for link in ("intra_bandwidth", "inter_bandwidth"):
        faster = replace(cluster, **{link: getattr(cluster, link) * gain})
        assert CollectiveCost(faster).seconds(op, size, members, nodes) <= base * (1 + 1e-9)
    assert cost.seconds(op, 2 * size, members, nodes) > base * 0.99


@pytest.mark.parametrize(("device", "name"), [("H200", "H200"), ("A100-SXM4", "A100")])
def test_large_all_reduces_agree_with_published_bandwidths(device, name):
    cost = CollectiveCost(named_cluster(name, 8))
    published = [
        figure
        for figure in catalogue().figures
        if device in figure.devices
        and figure.op in ("all_reduce", "all_gather", "reduce_scatter")
        and figure.timing == "back-to-back"
        and figure.ranks in (4, 8)
    ]
    assert published
    for figure in published:
        seconds = cost.seconds(figure.op, figure.bytes, figure.ranks)
        factor = OPERATIONS[figure.op].bus_factor(figure.ranks)
        measured = figure.bytes * factor / (figure.gbs * 1e9)
        assert seconds == pytest.approx(measured, rel=0.35 if figure.bytes < 2**27 else 0.15)


def test_small_messages_use_protocols_with_low_latency_and_large_ones_full_bandwidth():
    cost = CollectiveCost(parse_gpus("128xH100"))
    assert cost.choose("all_reduce", 1024, 8, 1)[0] == "ring ll"
    assert cost.choose("all_reduce", 2**28, 8, 1)[0] == "nvls simple"
    assert cost.choose("all_gather", 2**28, 8, 1)[0] == "ring simple"
    assert cost.choose("all_reduce", 1024, 8, 16)[0].startswith("tree")
    # GPUs without in-switch reduction never use it.
    assert "nvls" not in CollectiveCost(parse_gpus("8xA100")).choose("all_reduce", 2**28, 8, 1)[0]


def test_several_members_of_a_node_share_the_work_of_crossing_nodes():
    cost = CollectiveCost(parse_gpus("128xH100"))
    size = 2**30
    one, eight = cost.seconds("all_gather", size, 1, 16), cost.seconds("all_gather", size, 8, 16)
    # 8 NICs instead of 1, but also 8 times as many steps.
    assert one / eight == pytest.approx(8, rel=0.3)
    floor = size * 15 / 16 / (8 * 50e9)
    assert eight > floor


def test_measured_collectives_replace_the_model_inside_a_node():
    cluster = named_cluster("cpu", 4)
    measured = MeasuredCollective("all_reduce", 4, alpha_s=1e-5, beta_s_per_byte=1e-10)
    cost = CollectiveCost(cluster, (measured,))
    assert cost.seconds("all_reduce", 1e8, 4) == pytest.approx(2e-5 + 1.5 * 1e8 * 1e-10)
    assert cost.seconds("all_reduce", 1e8, 4, 2) != cost.seconds("all_reduce", 1e8, 4)
