"""Copies between GPUs of this host, compared. Run as a module it is the process that is watched.

It says each pair before it tries it: should a copy hang, the last one said is at fault.
"""

import json
from collections.abc import Sequence

from tutti.machine.checks.patient import Copy
from tutti.machine.checks.watched import python_module, run_watched

_SECONDS = 90.0


def copy_between_gpus(
    command: Sequence[str] | None = None, seconds: float = _SECONDS
) -> tuple[Copy, ...]:
    """Every pair, both ways. `command` is what to watch, for tests."""
    lines, code = run_watched(command or python_module(__name__), seconds)
    return read_copies(lines, code)


def read_copies(lines: Sequence[str], code: int | None) -> tuple[Copy, ...]:
    """What the watched process said; a pair that was begun and not ended hung or crashed."""
    found: dict[tuple[int, int], Copy] = {}
    for line in lines:
        try:
            said = json.loads(line)
            pair = (said["src"], said["dst"])
        except (ValueError, KeyError, TypeError):  # a line cut off, or a library's own
            continue
        if "status" in said:
            found[pair] = Copy(*pair, said["status"], said.get("gbs"), said.get("message", ""))
        elif code is None:
            found[pair] = Copy(*pair, "hung")
        else:
            found[pair] = Copy(*pair, "error", message=f"the process ended with code {code}")
    return tuple(found.values())


def main() -> None:
    """Try every pair."""
    import torch

    pattern = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8)
    for src in range(torch.cuda.device_count()):
        here = pattern.to(f"cuda:{src}")
        for dst in range(torch.cuda.device_count()):
            if src == dst:
                continue
            pair = {"src": src, "dst": dst}
            print(json.dumps(pair), flush=True)
            try:
                gbs, same = _copy(here, pattern, dst)
            except RuntimeError as error:
                said = str(error).splitlines()[0]
                print(json.dumps({**pair, "status": "error", "message": said}), flush=True)
                continue
            status = "ok" if same else "corrupt"
            print(json.dumps({**pair, "status": status, "gbs": gbs}), flush=True)


def _copy(here: object, pattern: object, dst: int) -> tuple[float, bool]:
    import torch

    assert isinstance(here, torch.Tensor) and isinstance(pattern, torch.Tensor)
    expected = pattern.to(f"cuda:{dst}")  # by way of the host
    there = torch.zeros_like(expected)
    quickest = float("inf")
    for _ in range(5):
        there.zero_()
        torch.cuda.synchronize(dst)
        with torch.cuda.device(here.device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            there.copy_(here)
            end.record()
            end.synchronize()
        torch.cuda.synchronize(dst)
        quickest = min(quickest, start.elapsed_time(end) / 1e3)
        if not torch.equal(there, expected):
            return here.numel() / quickest / 1e9, False
    return here.numel() / quickest / 1e9, True


if __name__ == "__main__":
    main()
