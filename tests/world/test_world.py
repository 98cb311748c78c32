"""A started world: a frozen value, working collectives, a clean end."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import tutti
from tutti.world.exchange import gather_json
from worlds import in_world, run_command, run_warm


def test_a_world_of_one_rank_works_and_ends_with_its_context() -> None:
    with tutti.init(device="cpu") as world:
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1, 1] and (world.rank, world.size) == (0, 1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            world.rank = 1  # type: ignore[misc]
        with pytest.raises(tutti.UsageError, match="already initialised"):
            tutti.init()
    assert not dist.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # variables set for the world are removed
    with tutti.init(device="cpu") as again:  # and can be started again
        assert again.size == 1


_COUNT_PAGE_FAULTS = """
import resource, torch, tutti

def page_faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [torch.ones(1 << 20) for _ in range(10)]  # 40 MB in blocks of 4
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with tutti.init(device="cpu"):
    steps = [page_faults_of_a_step() for _ in range(10)]  # in the first ones the heap grows
    print(sum(steps[5:]))
"""


def test_on_cpu_freed_memory_is_kept_for_the_next_step() -> None:
    command = [sys.executable, "-c", _COUNT_PAGE_FAULTS]
    kept = run_command(command)
    as_asked = run_command(command, env={"MALLOC_TRIM_THRESHOLD_": "131072"})

    assert kept.returncode == as_asked.returncode == 0, kept.stderr + as_asked.stderr
    pages = 5 * 10 * 1024
    assert int(kept.stdout) < pages / 10
    assert int(as_asked.stdout) >= pages


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(tutti.UsageError, match="device must be auto, cpu or cuda, got 'gpu'"):
        tutti.init(device="gpu")


def _reduce_and_inspect(world: tutti.World) -> dict[str, Any]:
    total = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(total)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    return {
        "sum": total.item(),
        "everyone": gather_json({"rank": world.rank, "näme": "ü" * world.rank}),
        "listening": listening,
        "threads": torch.get_num_threads(),
        "reasons": dict(world.reasons),
    }


def test_three_local_ranks_communicate_and_listen_on_loopback_only() -> None:
    results = in_world(_reduce_and_inspect, 3)
    for result in results:
        assert result["sum"] == 6.0
        assert [each["rank"] for each in result["everyone"]] == [0, 1, 2]
        assert result["everyone"][2]["näme"] == "üü"
        assert set(result["listening"]) <= {"127.0.0.1"}
        assert result["threads"] == max(1, len(os.sched_getaffinity(0)) // 3)


def _differ(world: tutti.World, what: str, uneven: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    recipe = {"lr": 0.1, "layout": "dp3"}
    if world.rank == uneven and what == "parameters":
        with torch.no_grad():
            model[0].weight[1, 2] += 1e-7
    if world.rank == uneven and what == "recipe":
        recipe["lr"] = 0.2
    try:
        tutti.check_same(world, recipe=recipe, model=model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "same"


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("parameters", "in 0.weight. Use the same seed"),
        ("recipe", "in lr (0.2, others 0.1). Start"),
    ],
)
def test_the_rank_that_differs_is_named_on_all_ranks(what: str, part: str) -> None:
    for message in in_world(_differ, 3, what, 1):
        assert message.startswith(f"RanksDiffer: the {what} of rank 1 on ")
        assert "from the other 2" in message and part in message


def test_equal_ranks_pass_check_same() -> None:
    assert in_world(_differ, 2, "nothing", 0) == ["same", "same"]


def test_a_usage_error_inside_the_world_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import tutti\nwith tutti.init():\n    raise tutti.UsageError('use --less')\n"
    )
    done = run_warm([script])
    assert (done.returncode, done.stderr) == (2, "tutti: use --less\n")


def test_a_usage_error_of_init_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tutti\ntutti.init()\n")
    lost = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "999"}
    done = run_warm([script], env=lost)
    assert done.returncode == 2
    assert done.stderr.startswith("tutti: the master 'nowhere.invalid' (from MASTER_ADDR)")
    assert done.stderr.count("\n") == 1
