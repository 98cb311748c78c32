"""Are the copies of `tutti bench bandwidth` as fast as a plain torch copy timed with events?

    python benchmarks/gpu_copies.py --json benchmarks/gpu_copies_DEVICE_DATE.json

Both take turns in one process, on tensors of the same size: a plain loop of `copy_` between two
events on fresh tensors, and a sample of the bench. A ratio is the bench's GB/s by the plain ones';
it should be 0.9 or more for each kind. What was copied is checked.
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
    """What a person would write: events around a loop of copies of another pair of tensors."""
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
        copy.time(samples=False)
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
