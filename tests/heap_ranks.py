"""Ranks that run a program on a symmetric heap, without tutti's launcher.

The launcher would end all ranks when one rank dies; in these tests, single ranks may die.
"""

from pathlib import Path

from worlds import start_warm

HEAD = """
import os, signal, sys, time, torch, torch.distributed as dist
from tutti.comm import symmetric
from tutti.world.errors import UsageError
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)

def caught(act):
    try:
        act()
    except Exception as error:
        print(type(error).__name__, getattr(error, "rank", "-"), error, flush=True)
    else:
        print("nothing raised", flush=True)
"""


def run_ranks(program: str, size: int, folder: Path, timeout: float = 60) -> list[tuple[int, str]]:
    """Run `program` on `size` ranks, and return exit code and output of each rank."""
    (folder / "program.py").write_text(HEAD + program)
    ranks = [
        start_warm([folder / "program.py", str(rank), str(size), folder]) for rank in range(size)
    ]
    try:
        outputs = ["".join(rank.communicate(timeout)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.wait(), output) for rank, output in zip(ranks, outputs, strict=True)]
