"""Reads the dumps of torch's flight recorder, without unpickling them.

torch writes one file per rank when a watchdog ends a job (TORCH_FR_DUMP_TEMP_FILE, or the older
TORCH_NCCL_DEBUG_INFO_TEMP_FILE, names the files). A dump is JSON, or a pickle of dicts, lists and
numbers. The pickle is interpreted here opcode by opcode, and an opcode that would call a function
is an error, so a dump cannot run code.
"""

import json
import pickletools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.observe.ring_reader import RUNNING, Group, Operation, Process, user_frame
from tutti.world.errors import UsageError

_MAX_BYTES = 1 << 28
# Names in dumps that differ from the names of the functions in torch.distributed.
_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_base": "all_to_all_single",
    "all_reduce_barrier": "barrier",
}
# Dumps name types as C++ does. All other names are the lower-case names of the ring.
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
}


def read_dumps(folder: Path) -> list[Process]:
    """Return one Process per dump in the folder, in rank order. File names end with the rank.

    A dump has operations and groups, but no stacks and no state of the process.
    """
    dumps: dict[int, dict[str, Any]] = {}
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        number = re.search(r"(\d+)(\.json|\.pkl|\.pickle)?$", path.name)
        content = _read(path) if number else None
        if number and content is not None:
            dumps.setdefault(int(number[1]), content)
    if not dumps:
        raise UsageError(
            f"--dumps {folder} has no dumps of the flight recorder. Name the directory of the "
            "files of TORCH_FR_DUMP_TEMP_FILE, whose names end with the rank."
        )
    size = max(dumps) + 1
    for content in dumps.values():
        for group in content["pg_config"].values():
            size = max(size, 1 + max(_ranks(group), default=0))
    now = max(
        (entry["time_created_ns"] for each in dumps.values() for entry in each["entries"]),
        default=0,
    )
    processes = [_process(rank, size, now, dumps[rank]) for rank in sorted(dumps)]
    return [_without_finished(process, processes) for process in processes]


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a dump, or None if the file is not a dump."""
    if path.stat().st_size > _MAX_BYTES:
        raise UsageError(f"--dumps: {path} is larger than {_MAX_BYTES >> 20} MiB. Remove the file.")
    raw = path.read_bytes()
    try:
        content = json.loads(raw) if raw[:1] == b"{" else _read_pickle(raw)
    except ValueError as error:
        raise UsageError(f"--dumps: {path} cannot be read: {error}. Remove the file.") from None
    if not isinstance(content, dict) or "entries" not in content:
        return None
    try:
        content.setdefault("pg_config", {})
        entries = [dict(entry) for entry in content["entries"]]
        for entry in entries:
            int(entry["time_created_ns"]), str(entry["profiling_name"]), entry["process_group"][0]
            int(entry["collective_seq_id"])
        content["entries"] = entries
        for group in content["pg_config"].values():
            _ranks(group)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--dumps: {path} is not a complete dump ({type(error).__name__}: {error}). Remove the "
            "file."
        ) from None
    return content


def _read_pickle(raw: bytes) -> Any:
    """Return the data of a pickle of dicts, lists, tuples, numbers and texts."""
    marker = object()
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        position = len(stack) - 1 - stack[::-1].index(marker)
        values = stack[position + 1 :]
        del stack[position:]
        return values

    def pairs(values: list[Any]) -> Iterator[tuple[Any, Any]]:
        return zip(values[::2], values[1::2], strict=True)

    def pop(count: int) -> tuple[Any, ...]:
        values = tuple(stack[len(stack) - count :])
        if len(values) != count:
            raise ValueError("the file is damaged")
        del stack[len(stack) - count :]
        return values

    literals = (
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
    )
    constants = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
    containers: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list}
    tuples = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(raw):
            name = opcode.name
            if name in ("PROTO", "FRAME"):
                continue
            if name == "STOP":
                return stack[-1]
            if name in literals:
                stack.append(argument)
            elif name in constants:
                stack.append(constants[name])
            elif name in containers:
                stack.append(containers[name]())
            elif name in tuples:
                stack.append(pop(tuples[name]))
            elif name == "MARK":
                stack.append(marker)
            elif name == "TUPLE":
                stack.append(tuple(since_mark()))
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "APPEND":
                (value,) = pop(1)
                stack[-1].append(value)
            elif name == "APPENDS":
                values = since_mark()
                stack[-1].extend(values)
            elif name == "SETITEM":
                key, value = pop(2)
                stack[-1][key] = value
            elif name == "SETITEMS":
                items = dict(pairs(since_mark()))
                stack[-1].update(items)
            else:
                raise ValueError(f"the pickle has the opcode {name}, which is not data")
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"the file is damaged ({type(error).__name__})") from None
    raise ValueError("the file ends too early")


def _ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group, which a dump has as the text of a list."""
    return tuple(int(number) for number in re.findall(r"\d+", str(dict(group).get("ranks", ""))))


def _process(rank: int, size: int, now: int, content: dict[str, Any]) -> Process:
    config = {str(name): _ranks(group) for name, group in content["pg_config"].items()}
    groups: dict[str, Group] = {}
    operations: list[Operation] = []
    for number, entry in enumerate(content["entries"], start=1):
        name, description = (str(each) for each in (*entry["process_group"], "")[:2])
        members = config.get(name, ()) or (tuple(range(size)) if name == "0" else ())
        backend, _, kind = str(entry["profiling_name"]).rpartition(":")
        message = re.match(r"(send|recv) (\d+)(?:->|<-)(\d+)", kind)
        kind = message[1] if message else kind.lower()
        key = f"{name}|{','.join(map(str, members)) or len(members)}"
        sequence = int(entry["p2p_seq_id"] if message else entry["collective_seq_id"])
        known = groups.get(key)
        collectives = max(known.collectives if known else 0, 0 if message else sequence)
        own = members.index(rank) if rank in members else rank
        groups[key] = Group(
            name, description, backend, own, len(members) or size, collectives, members
        )
        sizes: list[int] = next(iter(entry.get("input_sizes") or ()), [])
        dtype = next(iter(entry.get("input_dtypes") or ()), "").lower()
        elements = 1
        for each in sizes:
            elements *= int(each)
        completed = entry.get("time_discovered_completed_ns") or 0
        operations.append(
            Operation(
                number=number,
                kind=_NAMES.get(kind, kind),
                group=key,
                sequence=sequence,
                dtype=_DTYPES.get(dtype, dtype),
                shape=tuple(int(each) for each in sizes),
                elements=elements,
                # A message is named by the rank that calls, the arrow and the other rank.
                peer=int(message[3]) if message else -1,
                tag=-1,
                reduction="",
                device="cuda" if backend == "nccl" else "cpu",
                state="completed" if entry.get("state") == "completed" else "entered",
                site=_site(entry.get("frames") or ()),
                thread=0,
                step=0,
                entered=entry["time_created_ns"] / 1e9,
                completed=completed / 1e9,
            )
        )
    return Process(
        pid=rank,  # a dump does not have the pid
        rank=rank,
        world_size=size,
        worker=-1,
        parent=0,
        host="",
        job="",
        command="",
        backend=next((group.backend for group in groups.values()), ""),
        started=0.0,
        time=now / 1e9,
        clock_offset=0.0,
        alive=True,  # a dump does not say whether the process has ended
        state="",
        exit_state=RUNNING,
        exited_ago=None,
        error="",
        steps=0,
        batches=0,
        loaders_ended=0,
        entered=len(operations),
        completed=sum(not each.pending for each in operations),
        step_age=0.0,
        phase="other",
        phase_age=0.0,
        gil_age=0.0,
        sample_age=0.0,
        cpu_seconds=0.0,
        io_bytes=0,
        memory_bytes=0,
        groups=groups,
        operations=tuple(operations),
    )


def _site(frames: Any) -> str:
    return user_frame(f"{each['filename']}:{each['line']} in {each['name']}" for each in frames)


def _without_finished(process: Process, others: list[Process]) -> Process:
    """Return the process with the operations completed that must have completed.

    Only NCCL's dumps record that an operation has completed. With another backend, an operation is
    assumed to complete once all members have entered it.
    """
    entered: dict[tuple[str, int], set[int]] = {}
    for other in others:
        for each in other.operations:
            entered.setdefault((each.group, each.sequence), set()).add(other.rank)
    operations = [
        replace(each, state="completed")
        if each.pending
        and process.groups[each.group].backend != "nccl"
        and len(entered[each.group, each.sequence]) >= process.groups[each.group].size
        else each
        for each in process.operations
    ]
    return replace(process, operations=tuple(operations))
