"""Compare the copies of `tutti bench bandwidth` with plain torch copies timed with CUDA events.

    python benchmarks/gpu_copies.py --json benchmarks/gpu_copies_DEVICE_DATE.json

Both alternate in one process, on tensors of the same size: a sample of the bench, and a plain loop
of `copy_` on new tensors between two events. The ratio is bench GB/s / plain GB/s. The exit code is
1 if a ratio is below 0.9, or if a copy of the bench has a wrong element.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

import torch

from tutti.bench.bandwidth.point_to_point import Copy, copy_row, host_copies
from tutti.cli.results import write_json
from tutti.measure.spread import relative_mad

TURNS = 15
COPIES = 16


def plain_gbs(copy: Copy) -> float:
    """Return the GB/s of a plain loop of copies between two events, on new tensors."""
    source, target = copy.source.clone(), torch.empty_like(copy.target)
    if copy.source.is_pinned():
        source = source.pin_memory()
    if copy.target.is_pinned():
        target = target.pin_memory()
    target.copy_(source, non_blocking=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return COPIES * source.numel() / (start.elapsed_time(end) / 1e3) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for copy in host_copies(torch.device("cuda", 0), options.bytes):
        copy.time(keep_sample=False)
        plain = []
        for turn in range(TURNS):
            for which in ("bench", "plain") if turn % 2 else ("plain", "bench"):
                if which == "bench":
                    copy.time()
                else:
                    plain.append(plain_gbs(copy))
        row = copy_row(copy, 0) | {
            "plain_gbs": round(median(plain), 3),
            "plain_spread": round(relative_mad(plain), 4),
            "ratio": round(median(copy.speeds) / median(plain), 4),
        }
        rows.append(row)
        print(
            f"{row['kind']:<26} {row['gbs']:>9.2f} GB/s, plain {row['plain_gbs']:>9.2f}, "
            f"ratio {row['ratio']:.3f}, wrong {row['wrong']}, {row['verdict']}"
        )
    least = min(row["ratio"] for row in rows)
    print(f"least ratio {least:.3f}: {'OK' if least >= 0.9 else 'below 0.9'}")
    if options.json is not None:
        write_json(options.json, "tutti.benchmarks.gpu_copies/1", {"rows": rows, "least": least})
    return int(least < 0.9 or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
