"""tutti bench bandwidth: every part is measured and checked; flags, Ctrl-C, copies on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from worlds import TUTTI, in_world, run_command, run_tutti

BENCH = ["bench", "bandwidth"]
CPU = [*BENCH, "--device", "cpu"]
PAIR_KEYS = {
    *("src", "dst", "gbs_uni", "gbs_bi", "class", "verdict", "spread", "causes", "wrong", "bytes"),
}


def test_every_part_is_measured_and_correct(tmp_path: Path) -> None:
    flags = ["--ranks", 3, "--sizes", "64K", "--budget", "0.01", "--pin", "0/1/0", "--together"]
    # Two of the three ranks share a CPU, on which shm would spin.
    done = run_tutti(*CPU, *flags, "--backend", "gloo", "--json", tmp_path / "b.json")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "b.json").read_text())
    assert content["schema"] == "tutti.bench.bandwidth/1" and content["complete"]
    pairs = {(row["src"], row["dst"]): row for row in content["pairs"]}
    assert sorted(pairs) == [(a, b) for a in range(3) for b in range(3) if a != b]
    for (src, dst), row in pairs.items():
        assert row.keys() >= PAIR_KEYS and row["wrong"] == 0
        assert 0 < row["gbs_uni"] <= row["gbs_uni_best"] and row["gbs_bi"] > 0
        assert row["gbs_bi"] == pairs[dst, src]["gbs_bi"]
    assert pairs[0, 2]["class"] == pairs[2, 0]["class"] == "same core"
    assert pairs[0, 1]["class"] != "same core"
    assert [row["root"] for row in content["one_to_all"]] == [0, 1, 2]
    assert [row["op"] for row in content["all_to_all"]] == ["all_to_all"]
    backends = {row["backend"] for row in content["ring_vs_tree"]}
    assert {"gloo ring", "gloo tree", "gloo"} == backends
    for part in ("one_to_all", "all_to_all", "ring_vs_tree"):
        assert all(row["wrong"] == 0 for row in content[part])
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert "both ways, the sum" in done.stdout


# ---- Components, in a world of real ranks ----


def _all_reduces_and_corrupted_traffic(world: Any) -> Any:
    import torch
    import torch.distributed as dist

    from tutti.bench.bandwidth.point_to_point import (
        Traffic,
        TrafficMeter,
        ring_all_reduce,
        tree_all_reduce,
    )
    from tutti.bench.rank_control import RankControl

    # With fewer CPUs than ranks, shm would spin.
    group = dist.new_group(backend="gloo")
    wrong = []
    for count in (1, 2, 3, 1000):  # fewer elements than ranks, too
        for algorithm in (ring_all_reduce, tree_all_reduce):
            tensor = torch.arange(count, dtype=torch.float32) * (world.rank + 1)
            expected = torch.arange(count, dtype=torch.float32) * sum(range(1, world.size + 1))
            algorithm(tensor, torch.full_like(tensor, torch.nan), group)
            if not torch.equal(tensor, expected):
                wrong.append([algorithm.__name__, count])

    class CorruptingMeter(TrafficMeter):
        """Changes two received bytes on rank 1."""

        def _exchange_window(self, *arguments: Any) -> None:
            super()._exchange_window(*arguments)
            if world.rank == 1:
                self._received[5:7] += 1

    def fresh() -> list[Traffic]:
        return [Traffic("one way", ((0, 1),), 4000), Traffic("both ways", ((0, 2), (2, 0)), 4000)]

    honest, corrupted = fresh(), fresh()
    control = RankControl()
    TrafficMeter(group, control, world.device, 0.01).run(honest, lambda line: None)
    CorruptingMeter(group, control, world.device, 0.01).run(corrupted, lambda line: None)
    return {
        "wrong": wrong,
        "honest": [list(each.wrong.values()) for each in honest],
        "corrupted": [list(each.wrong.values()) for each in corrupted],
        "samples": [len(each.seconds[each.flows[0]]) for each in honest],
        "seconds": [list(each.seconds.values()) for each in honest],
    }


def test_ring_and_tree_are_correct_and_corrupted_messages_are_counted() -> None:
    first, *others = in_world(_all_reduces_and_corrupted_traffic, 3)
    assert first["wrong"] == [] and all(each["wrong"] == [] for each in others)
    assert first["honest"] == [[0], [0, 0]] and first["samples"] == [5, 5]
    # two bytes in each of five passes, on the flow to rank 1 alone
    assert first["corrupted"] == [[10], [0, 0]]
    # every rank has the figures of all flows
    assert all(each["seconds"] == first["seconds"] for each in others)


# ---- On a GPU ----


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_copies_between_host_and_device(tmp_path: Path) -> None:
    flags = ["--device", "cuda", "--ranks", "1", "--sizes", "64M", "--json", tmp_path / "b.json"]
    done = run_command([*TUTTI, *BENCH, *flags], env={"CUDA_VISIBLE_DEVICES": "0"}, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    copies = json.loads((tmp_path / "b.json").read_text())["copies"]
    kinds = [row["kind"] for row in copies]
    assert kinds == [
        "host to device, pinned",
        "host to device, pageable",
        "device to host, pinned",
        "device to host, pageable",
        "inside the device",
    ]
    assert all(row["wrong"] == 0 and row["gbs"] > 0 for row in copies)
    assert all(row["verdict"] == "unknown" for row in copies if "pinned" not in row["kind"])


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_ranks_that_share_a_gpu_are_measured_with_a_note(tmp_path: Path) -> None:
    flags = ["--device", "cuda", "--ranks", "2", "--ranks-per-gpu", "2", "--sizes", "1M"]
    done = run_command(
        [*TUTTI, *BENCH, *flags, "--budget", "0.05", "--json", tmp_path / "b.json"],
        env={"CUDA_VISIBLE_DEVICES": "0"},
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "b.json").read_text())
    assert {row["class"] for row in content["pairs"]} == {"same GPU"}
    assert all(row["wrong"] == 0 for row in content["pairs"] + content["ring_vs_tree"])
    assert "share one GPU" in done.stdout and content["world"]["sharing_note"]
