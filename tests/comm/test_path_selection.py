"""The table of measured paths selects the path of an operation if there are several paths."""

import dataclasses
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tutti import comm
from tutti.comm import path_selection
from tutti.comm.operation import CommGroup
from tutti.comm.path_selection import Choice, Measured, Row, Table, choose
from tutti.comm.shm import ShmOptions
from tutti.world.errors import UsageError
from tutti.world.world import World
from worlds import in_world

_GPU = ("nccl", "symmetric one-shot")


@pytest.fixture(autouse=True)
def cache_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _table(*rows: Row) -> Table:
    return Table("machine", 2, "2026-01-02", rows)


def test_with_one_path_there_is_no_choice() -> None:
    assert choose("all_reduce", 8, "cpu", ("gloo",), None) == Choice(
        "gloo", "the only path available"
    )
    table = _table(Row("all_reduce", "cpu", "shm", 0, None))
    assert choose("all_reduce", 8, "cpu", ("gloo",), table) == Choice(
        "gloo",
        "the only path available; shm is the fastest from 0 bytes when measured with 2 ranks on "
        "2026-01-02",
    )


@pytest.mark.parametrize(
    ("op", "size", "path"),
    [
        ("all_reduce", 0, "symmetric one-shot"),
        ("all_reduce", 512 * 1024 - 1, "symmetric one-shot"),
        ("all_reduce", 512 * 1024, "nccl"),
        ("all_gather", 8, "nccl"),
    ],
)
def test_without_measurements_the_defaults_are_used(op: str, size: int, path: str) -> None:
    choice = choose(op, size, "cuda", _GPU, None)
    assert choice.path == path and choice.reason.startswith("the default")
    assert choose(op, size, "cuda", _GPU, _table(Row("barrier", "cuda", "nccl", 0, None))) == choice


def test_measurements_take_precedence_over_the_defaults() -> None:
    table = _table(
        Row("all_reduce", "cuda", "nccl", 0, 1024, 9.25),
        Row("all_reduce", "cuda", "symmetric one-shot", 1024, None, 12.0),
        Row("all_reduce", "cpu", "shm", 0, None),
    )
    low = choose("all_reduce", 1023, "cuda", _GPU, table)
    assert low.path == "nccl"
    assert low.reason == (
        "the fastest from 0 bytes to 1024 when measured with 2 ranks on 2026-01-02, "
        "9.2 µs at the smallest size"
    )
    assert choose("all_reduce", 1 << 30, "cuda", _GPU, table).path == "symmetric one-shot"


def test_a_measured_path_that_is_not_available_is_ignored() -> None:
    table = _table(Row("all_reduce", "cuda", "gloo", 0, None))
    assert choose("all_reduce", 8, "cuda", _GPU, table).path == "symmetric one-shot"


_measurements = st.lists(
    st.builds(
        Measured,
        op=st.sampled_from(["all_reduce", "all_gather"]),
        device=st.just("cpu"),
        path=st.sampled_from(["gloo", "shm", "mpi"]),
        bytes=st.integers(0, 20).map(lambda power: 1 << power),
        time_us=st.floats(0.1, 1e6),
    )
)


@given(_measurements)
def test_a_table_names_the_fastest_path_at_every_size_measured(measured: list[Measured]) -> None:
    known = [each for each in measured if each.path != "mpi"]  # not a path of ours
    table = path_selection.fastest(measured, ranks=2)
    assert path_selection.parse(table.to_json()) == table
    for each in known:
        rivals = [m for m in known if (m.op, m.bytes) == (each.op, each.bytes)]
        fastest = {m.path for m in rivals if m.time_us == min(r.time_us for r in rivals)}
        row = table.row(each.op, "cpu", each.bytes, path_selection.PATHS)
        assert row is not None and row.path in fastest
    for op in {each.op for each in known}:  # no gaps: every size has a path
        assert all(
            table.row(op, "cpu", size, path_selection.PATHS) for size in (0, 7, 3000, 1 << 40)
        )


def test_a_table_is_kept_for_each_machine_and_number_of_ranks(tmp_path: Path) -> None:
    assert path_selection.load(4) is None
    table = path_selection.fastest([Measured("all_reduce", "cpu", "shm", 1024, 2.5)], ranks=4)
    file = path_selection.save(table)
    assert file.parent == tmp_path / "tutti" / "paths"
    assert file.name == f"{path_selection.machine_key()}-4.json"
    assert json.loads(file.read_text())["schema"] == "tutti.comm.paths/1"
    assert path_selection.load(4) == table and path_selection.load(2) is None
    assert list(file.parent.iterdir()) == [file]


def test_a_later_measurement_replaces_only_the_same_operation_on_the_same_device() -> None:
    def measured(op: str, device: str, path: str, date: str) -> Table:
        table = path_selection.fastest([Measured(op, device, path, 1024, 2.5)], ranks=4)
        return dataclasses.replace(table, measured=date)

    path_selection.file_for(4).parent.mkdir(parents=True)
    path_selection.file_for(4).write_text("damaged")
    path_selection.save(measured("all_reduce", "cuda", "nccl", "2026-01-01"))
    path_selection.save(measured("all_reduce", "cpu", "gloo", "2026-01-02"))
    path_selection.save(measured("all_gather", "cpu", "shm", "2026-01-03"))
    path_selection.save(measured("all_reduce", "cpu", "shm", "2026-01-04"))
    table = path_selection.load(4)
    assert table is not None and table.measured == "2026-01-04"
    assert [(row.op, row.device, row.path, row.measured) for row in table.rows] == [
        ("all_reduce", "cuda", "nccl", "2026-01-01"),
        ("all_gather", "cpu", "shm", "2026-01-03"),
        ("all_reduce", "cpu", "shm", None),
    ]
    assert "on 2026-01-01" in choose("all_reduce", 8, "cuda", _GPU, table).reason


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "its schema is not tutti.comm.paths/1"),
        ('{"schema": "tutti.comm.paths/2"}', "its schema is not tutti.comm.paths/1"),
        ('{"schema": "tutti.comm.paths/1"}', "a field is wrong or missing: 'rows'"),
    ],
)
def test_a_damaged_table_is_named_with_its_cure(text: str, why: str) -> None:
    file = path_selection.file_for(2)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        path_selection.load(2)
    message = str(caught.value)
    assert str(file) in message and why in message and "Delete it, or measure again" in message


@pytest.mark.parametrize("field", [{"path": "pigeon"}, {"op": "all"}, {"from_bytes": -1}])
def test_an_invalid_row_is_refused(field: dict[str, Any]) -> None:
    row = {"op": "all_reduce", "device": "cpu", "path": "shm", "from_bytes": 0, "to_bytes": None}
    content = {"machine": "m", "ranks": 2, "measured": "today", "rows": [{**row, **field}]}
    with pytest.raises(ValueError, match="its row for"):
        path_selection.parse(json.dumps({"schema": path_selection.SCHEMA, **content}))


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(UsageError, match="Set XDG_CACHE_HOME to a directory"):
        path_selection.save(_table())


def _explained(world: World) -> dict[str, str]:
    assert os.environ.get("XDG_CACHE_HOME")
    groups: dict[str, dist.ProcessGroup | None] = {"default": None}
    groups["gloo"] = dist.new_group(backend="gloo", group_desc="gloo")
    apart = ShmOptions(can_open=lambda card: False)  # as if each rank were on a host of its own
    groups["hosts"] = dist.new_group(backend="shm", pg_options=apart, group_desc="hosts")
    for words, arguments in {
        "op='allreduce' is not an operation: did you mean all_reduce": ("allreduce", 8),
        "bytes must be at least 0, got -1": ("all_reduce", -1),
        "device must be cpu for group default, got 'cuda'": ("all_reduce", 8, "cuda"),
    }.items():
        with pytest.raises(UsageError, match=words):
            comm.explain(*arguments[:2], device=arguments[2] if arguments[2:] else None)
    return {name: str(comm.explain("all_reduce", 64, group=each)) for name, each in groups.items()}


def test_explain_names_the_path_and_the_reason() -> None:
    expected = {"default": "shm", "gloo": "gloo", "hosts": "hierarchical"}
    for reports in in_world(_explained, 2):
        for group, text in reports.items():
            assert text == (
                f"all_reduce of 64 bytes on cpu in group {group} uses {expected[group]}: the "
                "only path available"
            )


def _by_size(world: World) -> list[str]:
    for count in (1, 1000, 4096, 100_003, 131_072, 300_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            tensor = torch.full((count,), world.rank + 1, dtype=dtype, device=world.device)
            for _ in range(3):
                comm.all_reduce(tensor, out=(out := torch.empty_like(tensor)))
                total = sum(range(1, world.size + 1))
                assert out.eq(total).all().item(), (count, dtype, out)
    return [str(comm.explain("all_reduce", size)) for size in (1024, 1 << 20)]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_cuda_small_all_reduces_use_symmetric_memory_unless_measured_slower(
    ranks: int,
) -> None:
    for small, large in in_world(_by_size, ranks, gpu=True):
        assert "uses symmetric one-shot: the default" in small, small
        assert "uses nccl: the default" in large, large
    path_selection.save(
        path_selection.fastest([Measured("all_reduce", "cuda", "nccl", 1024, 1.0)], ranks)
    )
    for small, large in in_world(_by_size, ranks, gpu=True):
        assert f"uses nccl: the fastest from 0 bytes when measured with {ranks} ranks" in small
        assert "uses nccl" in large


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-lazy", "NCCL"])
def test_all_nccl_backends_of_torch_are_one_path(name: str) -> None:
    class Group:
        def name(self) -> str:
            return name

    comm_group, group = object.__new__(CommGroup), Group()
    comm_group._backends = {}
    comm_group._group = weakref.ref(group)  # type: ignore[arg-type]
    assert comm_group.backend("cuda") == "nccl"
