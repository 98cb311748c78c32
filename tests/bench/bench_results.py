"""Results of a bench as --json writes them, for tests of compare and --expect."""

import copy
from typing import Any

ENVIRONMENT = {
    "host": "a", "system": "Linux", "cpu": "x", "cpus": "0-1", "cpu_quota": None,
    "memory_bytes": 1, "gpus": [], "versions": {"torch": "2.13"}, "variables": {},
}  # fmt: skip


def operation(size: int, p50: float, cv: float = 0.02, **changes: Any) -> dict[str, Any]:
    times = {"p50": p50, "p95": p50 * (1 + 2 * cv), "min": p50 * (1 - 2 * cv), "cv": cv}
    return {
        "op": "all_reduce", "backend": "nccl", "ranks": 8, "bytes": size, "dtype": "float32",
        "redop": "sum", "placement": "in", "timing": "back-to-back", "time_us": times,
        "busbw_gbs": size / p50 / 1e3, "wrong": 0,
    } | changes  # fmt: skip


def result(kind: str, **parts: Any) -> dict[str, Any]:
    world = {"size": 2, "ranks": [{"device": "cpu", "node": 0, "ranks_on_device": 1}]}
    return {
        "schema": f"tutti.bench.{kind}/1",
        "environment": copy.deepcopy(ENVIRONMENT),
        "complete": True,
        "world": world,
    } | parts
