"""Makes a small fixture from a real trace: only the events of two steps that the reader uses.

    python tests/profile/trim_trace.py RUN/traces/rank*.json.gz --out tests/profile/fixtures/nccl4
    python tests/profile/trim_trace.py … --steps 3 --first 6

It keeps the steps, kernels and copies on the device, the launches of those kernels,
record_param_comms, autograd functions, and the metadata of ranks and groups. Names of computing
kernels are shortened, addresses and stacks dropped, and the host name is replaced.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

from tutti.profile.trace_file import Event, TraceFile

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ARGUMENTS = {
    *("Collective name", "Process Group Name", "Process Group Description", "dtype"),
    *("In msg nelems", "Out msg nelems", "Seq", "Group size", "Process Group Ranks"),
    *("Dst Rank", "Src Rank", "External id", "correlation", "stream", "device", "grid", "block"),
}
_METADATA = ("schemaVersion", "distributedInfo", "baseTimeNanoseconds", "displayTimeUnit")
_LARGEST = 100_000  # bytes of a fixture


def trim(path: Path, first: int, steps: int) -> dict[str, Any]:
    """Return the trace with `steps` steps from number `first` on. 0 is the first step."""
    file = TraceFile(path)
    events = [event for event in file.events() if event.get("ph") == "X" and "dur" in event]
    numbers = sorted({_number(event) for event in events} - {None})[first : first + steps]
    if len(numbers) < steps:
        raise SystemExit(f"{path} has no {steps} steps from its step {first} on")
    chosen = [e for e in events if e["cat"] == "user_annotation" and _number(e) in numbers]
    start = min(float(event["ts"]) for event in chosen)
    end = max(float(event["ts"]) + float(event["dur"]) for event in chosen)
    within = [event for event in events if start <= float(event["ts"]) <= end]
    # The device runs behind the host: select the kernels that were launched in these steps.
    launched = {_argument(event, "correlation") for event in within if event["cat"] in _LAUNCHES}
    kept = [e for e in events if e["cat"] in _DEVICE and _argument(e, "correlation") in launched]
    # A launch is needed only with its kernel.
    kernels = {_argument(event, "correlation") for event in kept}
    kept += chosen + [event for event in within if _is_kept(event, kernels)]
    metadata = {name: file.metadata[name] for name in _METADATA if name in file.metadata}
    devices = file.metadata.get("deviceProperties") or []
    metadata["deviceProperties"] = [
        {key: each[key] for key in ("id", "name", "totalGlobalMem") if key in each}
        for each in devices
    ]
    capture_info = {k: v for k, v in (file.metadata.get("tutti") or {}).items() if k != "recorder"}
    small = [_small(event) for event in sorted(kept, key=lambda event: float(event["ts"]))]
    return metadata | {"host_name": "host", "tutti": capture_info, "traceEvents": small}


def _number(event: Event) -> int | None:
    name = str(event.get("name", ""))
    return int(name[13:]) if name.startswith("ProfilerStep#") else None


def _argument(event: Event, name: str) -> Any:
    return event.get("args", {}).get(name)


def _is_kept(event: Event, kernels: set[Any]) -> bool:
    """Return whether the reader uses a host event."""
    category, name = event["cat"], str(event["name"])
    return (
        (category in _LAUNCHES and "Launch" in name and _argument(event, "correlation") in kernels)
        or name == "record_param_comms"
        or name.startswith("autograd::engine::")
        or (category == "user_annotation" and name.startswith("enumerate(DataLoader)"))
    )


def _small(event: Event) -> Event:
    name = str(event["name"])
    if event["cat"] == "kernel" and "nccl" not in name.lower():
        name = name[:24]
    fields = {key: value for key, value in event.get("args", {}).items() if key in _ARGUMENTS}
    kept = {key: event[key] for key in ("ph", "cat", "pid", "tid", "ts", "dur") if key in event}
    return kept | {"name": name} | ({"args": fields} if fields else {})


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=1, help="the first step to keep")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.traces:
        content = json.dumps(trim(path, options.first, options.steps), separators=(",", ":"))
        target = options.out / f"{path.name.partition('.')[0]}.json.gz"
        target.write_bytes(gzip.compress(content.encode(), 9, mtime=0))
        size = target.stat().st_size
        print(f"{target}: {size:,} bytes" + (" (too large!)" if size > _LARGEST else ""))


if __name__ == "__main__":
    main(sys.argv[1:])
