"""Clusters: from a name, from cluster.toml and from a recorded machine; groups over nodes."""

from pathlib import Path

import pytest

from tutti.machine.hardware_catalogue import accelerator
from tutti.parallel.layout import Layout
from tutti.plan.cluster_spec import (
    known_accelerators,
    limit_power,
    named_cluster,
    parse_gpus,
    read_cluster,
    read_machine_cluster,
    spread_over_nodes,
)
from tutti.world.errors import UsageError

MACHINES = Path(__file__).parents[1] / "machine" / "machines"


def test_a_name_gives_the_figures_of_the_catalogue():
    cluster = parse_gpus("16xH100")
    assert (cluster.gpus, cluster.per_node, cluster.nodes) == (16, 8, 2)
    assert cluster.peak("bf16") == 989e12
    assert cluster.peak("float32") == 67e12
    assert cluster.memory_bytes == 80e9
    assert any("inter_gbs" in text for text in cluster.assumptions)
    assert parse_gpus("8xA100-40GB").memory_bytes == 40e9
    assert parse_gpus("4 x h200", per_node=2).nodes == 2


def test_every_accelerator_has_peaks_links_and_memory():
    for name in known_accelerators():
        cluster = named_cluster(name, 2)
        assert accelerator(cluster.device) is not None
        assert 0.3 < cluster.gemm_efficiency < 1
        assert cluster.memory_bandwidth > 5e11
        assert cluster.intra_bandwidth > 1e10


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("16xH10O", "H100"),  # a letter instead of a digit: the near name is suggested
        ("16xL40S", "--cluster"),
        ("H100", "16xH100"),
        ("12xH100", "16 GPUs"),
        ("0xH100", "at least 1"),
    ],
)
def test_wrong_clusters_are_refused_with_a_cure(text, named):
    with pytest.raises(UsageError) as error:
        parse_gpus(text)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_cluster_file_replaces_figures(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('gpus = "64xH100"\nper_node = 4\ninter_gbs = 25\nprice_per_gpu_hour = 2.5\n')
    cluster = read_cluster(path)
    assert (cluster.nodes, cluster.inter_bandwidth, cluster.price_per_gpu_hour) == (16, 25e9, 2.5)
    assert not any(text.startswith("inter_gbs") for text in cluster.assumptions)

    path.write_text(
        'gpus = "8xL40S"\nbf16_tflops = 362\nfp32_tflops = 91.6\nmemory_gb = 48\n'
        "memory_tbs = 0.864\nintra_gbs = 26\n"
    )
    cluster = read_cluster(path)
    assert cluster.accelerator == "L40S"
    assert cluster.peak("bf16") == pytest.approx(362e12)
    assert cluster.memory_bytes == 48e9

    for text, named in [
        ('gpus = "8xH100"\ninter_gb = 5', "inter_gbs"),
        ('gpus = "8xH100"\nwatts = -1', "watts"),
        ("per_node = 8", "gpus"),
        ("gpus = ", "cluster.toml"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=named):
            read_cluster(path)
    with pytest.raises(UsageError, match="does not exist"):
        read_cluster(tmp_path / "missing.toml")


def test_recorded_machines(tmp_path):
    cluster = read_machine_cluster(MACHINES / "h100-nvswitch.json")
    assert (cluster.gpus, cluster.per_node) == (8, 8)
    assert cluster.intra_bandwidth == pytest.approx(18 * 26.562e9)
    assert cluster.switched
    assert read_machine_cluster(MACHINES / "h100-nvswitch.json", gpus=32).nodes == 4
    assert read_machine_cluster(MACHINES / "cpu-only.json", gpus=2).is_cpu
    with pytest.raises(UsageError, match="L40S"):
        read_machine_cluster(MACHINES / "pcie-box.json")
    other = tmp_path / "machine.json"
    other.write_text('{"schema": "tutti.machine/0"}')
    with pytest.raises(UsageError, match="tutti topo --record"):
        read_machine_cluster(other)


def test_groups_of_an_axis_over_nodes():
    cluster = parse_gpus("32xH100")  # 4 nodes of 8
    layout = Layout(dp=2, shard=2, tp=4, pp=2)
    assert cluster.members_and_nodes(layout, "tp") == (4, 1)
    assert cluster.members_and_nodes(layout, "shard") == (2, 1)
    assert cluster.members_and_nodes(layout, "dp") == (1, 2)
    assert cluster.members_and_nodes(layout, "data") == (2, 2)
    # With tp outermost, the ranks of a tp group are on different nodes.
    assert cluster.members_and_nodes(layout, "tp", ("tp", "pp", "dp", "shard")) == (1, 4)
    assert spread_over_nodes(6, 1, 4) == (3, 2)


def test_a_lower_power_limit_slows_matrix_products_only():
    cluster = named_cluster("H100", 8)
    limited = limit_power(cluster, 500)
    assert limited.gemm_efficiency == pytest.approx(cluster.gemm_efficiency * (5 / 7) ** 0.75)
    assert limited.memory_bandwidth == cluster.memory_bandwidth
    assert limit_power(cluster, 900).gemm_efficiency == cluster.gemm_efficiency
