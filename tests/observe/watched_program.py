"""Trains a small model with plain DDP and planted delays: BACKEND FOLDER [[KIND, RANK, STEPS, MS]].

After the last step every rank waits until it is killed, so that its records can be read. In the
folder, the delayed rank writes how long its delays really were.
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PERIOD = 5
_BASE = 0.01  # seconds that every rank sleeps in every step


class _Planted:
    """Delays one rank, and measures the delays."""

    def __init__(self, kind: str, rank: int, milliseconds: float) -> None:
        self.kind, self.mine, self.seconds = kind, dist.get_rank() == rank, milliseconds / 1e3
        self.delays: list[float] = []

    def __call__(self, place: str, step: int) -> None:
        kind = "compute" if self.kind == "periodic" else self.kind
        if not self.mine or place != kind or (self.kind == "periodic" and step % PERIOD):
            return
        began = time.perf_counter()
        if kind == "collection":
            gc.collect()
        else:
            time.sleep(self.seconds)
        self.delays.append(time.perf_counter() - began)


class _Data(torch.utils.data.IterableDataset[Any]):
    def __init__(self, steps: int, planted: _Planted) -> None:
        self.steps, self.planted = steps, planted

    def __iter__(self) -> Any:
        for step in range(self.steps):
            self.planted("input", step)
            yield torch.randn(8, 64)


def main() -> None:
    backend, folder, phases = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    gc.freeze()  # otherwise a collection visits all objects of torch
    garbage = [[number] for number in range(800_000)]  # a collection takes about 60 ms
    dist.init_process_group(backend)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
    # Several buckets, so that the first all-reduce runs while backward computes.
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    measured = []
    for kind, rank, steps, milliseconds in phases:
        planted = _Planted(kind, rank, milliseconds)
        for step, batch in enumerate(torch.utils.data.DataLoader(_Data(steps, planted), None)):
            time.sleep(_BASE)
            planted("compute", step)
            planted("collection", step)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        measured.append(sorted(planted.delays)[len(planted.delays) // 2] if planted.delays else 0)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(measured))
    time.sleep(300)
    del garbage


if __name__ == "__main__":
    main()
