"""tutti bench tune: the fastest path by size, and the table that tutti.comm reads."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tutti.bench.collectives.interleaved_sweep import path_measurements, smooth_choice
from tutti.comm.path_selection import Measured, choose, fastest, load, save
from worlds import TUTTI, run_command, run_tutti

NCCL, ONE_SHOT = "nccl", "symmetric one-shot"


def _measured(times: dict[int, tuple[float | None, float | None]]) -> list[Measured]:
    """Return measurements of all_reduce from {size: (time of NCCL, time of one-shot kernels)}."""
    return [
        Measured("all_reduce", "cuda", path, size, each)
        for size, both in times.items()
        for path, each in zip((NCCL, ONE_SHOT), both, strict=True)
        if each is not None
    ]


def test_a_group_with_one_path_is_not_measured(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--ranks", "2", "--json", tmp_path / "t.json"]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_tutti("bench", "tune", *flags, env=cache)
    assert done.returncode == 0, done.stderr
    assert "on cpu a group of 2 ranks has only one all_reduce" in done.stdout
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["schema"] == "tutti.bench.tune/1" and content["rows"] == []
    assert content["table"] is None and content["written"] is None
    assert not (tmp_path / "cache" / "tutti" / "paths").exists()


def test_noise_around_a_crossover_gives_a_single_change_of_path() -> None:
    # At the middle sizes the faster path alternates, by less than a change must gain.
    noisy = {
        1024: (12.0, 5.0), 2048: (12.0, 6.0), 4096: (12.0, 12.2), 8192: (13.0, 12.8),
        16384: (13.1, 13.3), 32768: (14.0, 20.0), 65536: (16.0, 38.0),
    }  # fmt: skip
    paths = [each.path for each in smooth_choice(_measured(noisy))]
    assert paths[:2] == [ONE_SHOT] * 2 and paths[-2:] == [NCCL] * 2
    assert sum(one != other for one, other in pairwise(paths)) == 1


def test_a_change_of_path_must_gain_enough() -> None:
    slower_once = {1: (10.0, 20.0), 2: (10.3, 10.0), 4: (10.0, 20.0)}
    assert [each.path for each in smooth_choice(_measured(slower_once))] == [NCCL] * 3
    much_slower_once = {1: (10.0, 20.0), 2: (15.0, 10.0), 4: (10.0, 20.0)}
    assert [each.path for each in smooth_choice(_measured(much_slower_once))] == [
        NCCL,
        ONE_SHOT,
        NCCL,
    ]


def test_a_path_with_a_size_limit_is_left_at_its_limit() -> None:
    ends = {1024: (12.0, 5.0), 2048: (12.0, 6.0), 4096: (12.0, None)}
    assert [each.path for each in smooth_choice(_measured(ends))] == [ONE_SHOT, ONE_SHOT, NCCL]


def test_comm_uses_the_saved_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = {1024: (12.0, 5.0), 65536: (14.0, 9.0), 1 << 20: (20.0, 60.0)}
    written = save(fastest(smooth_choice(_measured(times)), ranks=4, dtype="float32"))
    assert written.is_relative_to(tmp_path)
    table = load(4)
    both = (NCCL, ONE_SHOT)
    assert choose("all_reduce", 65536, "cuda", both, table).path == ONE_SHOT
    assert choose("all_reduce", 1 << 20, "cuda", both, table).path == NCCL


def test_rows_with_wrong_results_are_not_used() -> None:
    row = {"op": "all_reduce", "backend": "nccl", "bytes": 1024, "time_us": {"p50": 12.0}}
    found = path_measurements([{**row, "wrong": 0}, {**row, "wrong": 1, "bytes": 2048}], "cuda")
    assert found == [Measured("all_reduce", "cuda", NCCL, 1024, 12.0)]


@pytest.mark.gpu
def test_paths_on_a_gpu_are_measured_and_saved(tmp_path: Path) -> None:
    flags = ["--device", "cuda", "--ranks", "2", "--ranks-per-gpu", "2", "--sizes", "1K,64K,2M"]
    done = run_command(
        [*TUTTI, "bench", "tune", *flags, "--budget", "0.05", "--json", tmp_path / "t.json"],
        env={"CUDA_VISIBLE_DEVICES": "0", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "t.json").read_text())
    assert {row["backend"] for row in content["rows"]} == {"nccl", "staged"}
    assert content["table"]["rows"] and Path(content["written"]).is_file()
