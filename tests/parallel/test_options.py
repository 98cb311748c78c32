"""Options that contradict each other, or that the engine would ignore, are refused."""

from typing import Any

import pytest

from tutti import UsageError
from tutti.parallel import EngineOptions
from tutti.parallel.layout import flag_of, leave_out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "single"},
        {"engine": "dataparallel"},
        {"engine": "scratch", "scratch_reduce": "each", "sync_batchnorm": True},
        {"engine": "scratch", "find_unused": True},
        {"overlap": False, "find_unused": True, "bucket_mb": 0.5},
        {"static_graph": True, "compress": "bf16", "gradient_as_bucket_view": False},
        {"compress": "powersgd", "powersgd_rank": 4},
    ],
)
def test_options_that_go_together_are_accepted(options: dict[str, Any]) -> None:
    accepted = EngineOptions(**options)
    assert {name: getattr(accepted, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"compress": "bf16", "overlap": False}, ["--compress bf16", "--no-overlap"]),
        ({"static_graph": True, "overlap": False}, ["--static-graph", "--no-overlap"]),
        ({"static_graph": True, "find_unused": True}, ["--static-graph", "--find-unused"]),
        ({"powersgd_rank": 4}, ["--powersgd-rank 4", "--compress none"]),
        ({"engine": "scratch", "compress": "fp16"}, ["--compress fp16", "--engine scratch"]),
        ({"engine": "scratch", "overlap": False}, ["--no-overlap", "--engine scratch"]),
        ({"engine": "single", "bucket_mb": 1.0}, ["--bucket-mb 1.0", "--engine single"]),
        ({"engine": "single", "find_unused": True}, ["--find-unused", "--engine ddp or scratch"]),
        ({"engine": "dataparallel", "sync_batchnorm": True}, ["--sync-batchnorm", "dataparallel"]),
        ({"scratch_reduce": "each"}, ["--scratch-reduce each", "--engine scratch"]),
        ({"bucket_mb": 0.0}, ["--bucket-mb is 0"]),
        ({"compress": "powersgd", "powersgd_rank": 0}, ["--powersgd-rank is 0"]),
    ],
)
def test_contradictions_name_both_flags(options: dict[str, Any], flags: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        EngineOptions(**options)
    for flag in flags:
        assert flag in str(refused.value)


def test_a_cure_is_a_flag_that_exists() -> None:
    assert flag_of("overlap", False) == "--no-overlap"
    assert flag_of("reshard", False) == "--reshard False"  # None is a third value: no --no-reshard
    assert "--reshard None" in leave_out("reshard", None)
