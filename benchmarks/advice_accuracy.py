"""How well `tutti profile` predicts the gain of its advice, over many small programs.

    python benchmarks/advice_accuracy.py --json advice_accuracy_MACHINE_DATE.json

Each workload is an ordinary program of two ranks, or a command of tutti. `tutti profile
--try-advice` records it, tries the first advice that can be applied, and measures the gain in five
pairs of runs. The prediction is right if the measured gain lies in the printed band. If no advice
is offered, the workload's `alternatives` are measured instead. Advice is missing if one of them
gains more than 10 % of the step in each of its pairs of runs. Advice that repeats the present
setting is an error, which the result counts.

Several workloads run at the same time. Each workload is bound to its own CPUs (`--cpus`). A
workload that has not ended after `--minutes` is killed and left out. `forked_programs.py` starts
the programs without importing torch each time.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

MISSED_SHARE = 0.10  # of the step
RANKS = 2
FORKED = Path(__file__).with_name("forked_programs.py").absolute()


@dataclass(frozen=True)
class Workload:
    """A program. Times are seconds."""

    widths: tuple[int, ...] = (256,) * 9  # of the linear layers
    batch: int = 64
    ddp: dict[str, Any] = field(default_factory=dict)  # arguments of DistributedDataParallel
    engine: str = "ddp"  # or fsdp
    reshard: bool = True  # reshard_after_forward of fsdp
    load_s: float = 0.0  # the dataset sleeps for each batch
    load_work: int = 0  # the dataset multiplies matrices of this size for each batch
    slow_rank: int | None = None  # only this rank sleeps
    workers: int = 0
    passes: int = 1  # backward passes per step
    no_sync: bool = False
    extra_batch: int = 0  # samples that rank 1 computes in addition
    command: tuple[str, ...] = ()  # a command of tutti instead of this program
    alternatives: tuple[dict[str, Any], ...] = ()  # tried if no advice is offered


def bucket_sizes(*sizes: float) -> tuple[dict[str, Any], ...]:
    return tuple({"ddp": {"bucket_cap_mb": size}} for size in sizes)


NARROW = tuple(64 if n % 3 else 192 for n in range(25))
DEEP = (32,) * 150
WIDE = (1024,) * 9  # 8 layers of 4 MB
MIXED = (128, 512, 1024, 512, 128, 1024, 256, 1024)
VIEW = {"ddp": {"gradient_as_bucket_view": True}}
WORKERS = {"loader": {"num_workers": 2, "persistent_workers": True}}
WORKLOADS = {
    "tiny_buckets": Workload(NARROW, ddp={"bucket_cap_mb": 0.01}),
    "small_buckets_equal_layers": Workload(
        (256,) * 17, ddp={"bucket_cap_mb": 0.1}, alternatives=bucket_sizes(1, 25)
    ),
    "small_buckets_mixed_layers": Workload(MIXED, ddp={"bucket_cap_mb": 0.1}),
    "small_buckets_wide_layers": Workload(
        WIDE, ddp={"bucket_cap_mb": 1}, alternatives=bucket_sizes(10, 50)
    ),
    "default_buckets": Workload(WIDE, alternatives=bucket_sizes(5, 50)),
    "one_bucket_much_compute": Workload(
        WIDE, batch=512, ddp={"bucket_cap_mb": 200}, alternatives=bucket_sizes(5, 10)
    ),
    "many_small_parameters": Workload(DEEP, batch=16, alternatives=(VIEW, *bucket_sizes(0.1))),
    "many_small_parameters_tiny_buckets": Workload(DEEP, batch=16, ddp={"bucket_cap_mb": 0.005}),
    "copied_gradients": Workload(WIDE, batch=8, alternatives=(VIEW,)),
    "find_unused": Workload(
        DEEP,
        batch=16,
        ddp={"find_unused_parameters": True},
        alternatives=({"ddp": {"find_unused_parameters": False}},),
    ),
    "slow_loader": Workload(load_s=0.02),
    "very_slow_loader": Workload(load_s=0.08),
    "slow_loader_of_one_rank": Workload(load_s=0.03, slow_rank=1),
    "loader_that_computes": Workload(load_work=500, alternatives=(WORKERS,)),
    "too_few_workers": Workload((512,) * 9, batch=256, load_s=0.1, workers=1),
    "enough_workers": Workload(load_s=0.005, workers=4, alternatives=bucket_sizes(25)),
    "accumulation_without_no_sync": Workload(WIDE, batch=16, passes=4),
    "accumulation_small_model": Workload(NARROW, passes=3),
    "accumulation_with_no_sync": Workload(
        (512,) * 9, batch=256, passes=4, no_sync=True, alternatives=bucket_sizes(1)
    ),
    "fsdp_resharded": Workload((768,) * 9, engine="fsdp", batch=32),
    "fsdp_not_resharded": Workload((768,) * 9, engine="fsdp", reshard=False, batch=32),
    "uneven_batch": Workload((512,) * 9, extra_batch=128, alternatives=bucket_sizes(1)),
    "balanced": Workload((512,) * 9, batch=512, alternatives=(*bucket_sizes(1, 25), VIEW)),
    "slow_loader_wide_layers": Workload(WIDE, batch=16, load_s=0.06),
    "slow_loader_deep": Workload(DEEP, batch=16, load_s=0.03),
    "two_workers_of_four": Workload((512,) * 9, batch=128, load_s=0.12, workers=2),
    "very_slow_loader_of_one_rank": Workload(load_s=0.1, slow_rank=0),
    "accumulation_two_passes": Workload((1024,) * 6, batch=16, passes=2),
    "accumulation_eight_passes": Workload((512,) * 9, batch=32, passes=8),
    "copied_gradients_narrower": Workload((768,) * 13, batch=8, alternatives=(VIEW,)),
    "copied_gradients_wider": Workload((2048,) * 4, batch=4, alternatives=(VIEW,)),
    "fsdp_resharded_wide": Workload(WIDE, engine="fsdp", batch=16),
    "small_buckets_deep": Workload(DEEP, batch=16, ddp={"bucket_cap_mb": 0.02}),
    "tutti_train_tiny_buckets": Workload(
        command=(
            *("train", "--no-evaluate"),
            *("--recipe", "lenet", "--ranks", "2", "--device", "cpu"),
            *("--bucket-mb", "0.002", "--steps", "200"),
        )
    ),
}


def start_ranks(load: Workload, steps: int) -> None:
    """Fork the ranks from this process, so that torch is imported only once."""
    import torch  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        arguments = [(load, steps, rank, f"file://{folder}/store") for rank in range(RANKS)]
        ranks = [context.Process(target=train, args=each) for each in arguments]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if codes := [process.exitcode for process in ranks if process.exitcode]:
        raise SystemExit(codes[0])


def train(load: Workload, steps: int, rank: int, store: str) -> None:
    """One rank of the program."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    batch = load.batch + (load.extra_batch if rank == 1 else 0)
    matrix = torch.randn(load.load_work, load.load_work)

    class Samples(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return batch * steps * load.passes

        def __getitem__(self, index: int) -> torch.Tensor:
            if index % batch == 0 and load.slow_rank in (None, rank):
                time.sleep(load.load_s)
                if load.load_work:
                    torch.mm(matrix, matrix)
            return torch.ones(load.widths[0])

    blocks = [nn.Sequential(nn.Linear(*sizes), nn.ReLU()) for sizes in pairwise(load.widths)]
    model: Any = nn.Sequential(*blocks)
    if load.engine == "fsdp":
        for block in blocks:
            fully_shard(block, reshard_after_forward=load.reshard)
        fully_shard(model, reshard_after_forward=load.reshard)
    else:
        model = DistributedDataParallel(model, **load.ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Samples(), batch_size=batch, num_workers=load.workers)
    for number, inputs in enumerate(loader, 1):
        is_last = number % load.passes == 0
        if load.no_sync and not is_last:
            with model.no_sync():
                model(inputs).square().mean().backward()
        else:
            model(inputs).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def measure(name: str, cpus: list[int], pairs: int, end: float) -> dict[str, Any] | None:
    """Profile one workload on these CPUs, and try its advice or its alternatives.

    The result is None if the workload has not ended at the time `end`.
    """
    load = WORKLOADS[name]
    bound = ["taskset", "-c", ",".join(map(str, cpus))]
    forked = [sys.executable, str(FORKED), str(Path(__file__).absolute()), "--train", name]
    program = list(load.command) or forked
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = [*bound, sys.executable, "-m", "tutti", "profile", "--try-advice", "--active", "10"]
        words += ["--out", f"{folder}/out", "--json", str(result), "--", *program]
        done = _run_until(end, words, folder)
        if done is None:
            return None
        row: dict[str, Any] = {"workload": name, "settings": asdict(load), "cpus": cpus}
        if done.returncode or not result.is_file():
            return row | {"error": (done.stdout + done.stderr)[-2000:]}
        profile = json.loads(result.read_text())
        keys = ("id", "gain_s", "gain_s_band", "finding", "try", "change")
        row["step_s"] = median(step["seconds"] for step in profile["steps"])
        row["advice"] = [{key: each[key] for key in keys} for each in profile["advice"]]
        row["repeats_present_setting"] = [
            each["id"] for each in row["advice"] if repeats_present_setting(load, each["change"])
        ]
        row["tried"] = tried = profile.get("tried")
        if tried is not None:
            row["within"] = tried["within"]
        else:
            row["alternatives"] = []
            for number, change in enumerate(load.alternatives):
                task = json.dumps([program, change, row["step_s"], f"{folder}/{number}", pairs])
                tested = _alternative(bound, change, task, end)
                if tested is None:
                    return None
                row["alternatives"].append(tested)
            row["missed"] = any(each["is_gain"] for each in row["alternatives"])
    return row | {"seconds": time.monotonic() - began}


def repeats_present_setting(load: Workload, change: dict[str, Any] | None) -> bool:
    """Return whether a change sets only values that the workload already has."""
    present: dict[str, Any] = {
        "ddp": {
            "bucket_cap_mb": 25,
            "gradient_as_bucket_view": False,
            "find_unused_parameters": False,
            **load.ddp,
        },
        "loader": {"num_workers": load.workers},
        "fsdp": {"reshard_after_forward": load.reshard, "forward_prefetch": False},
        "flags": dict(zip(load.command[::2], load.command[1::2], strict=False)),
    }
    if not change:
        return False
    if "no_sync" in change:
        return load.no_sync or load.passes == 1
    wanted = [
        present[kind].get(name) == value
        for kind in ("ddp", "loader", "fsdp", "flags")
        for name, value in change.get(kind, {}).items()
        if name != "persistent_workers"
    ]
    return bool(wanted) and all(wanted)


def _run_until(end: float, words: list[str], folder: str) -> Any:
    """Run a command and return the completed process, or None if it runs at the time `end`."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    ) as process:
        try:
            output, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()  # tutti profile passes the signal on to the program
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
            return None
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def _alternative(
    bound: list[str], change: dict[str, Any], task: str, end: float
) -> dict[str, Any] | None:
    """Measure the gain of a change in a process of its own, which can receive signals."""
    done = _run_until(
        end, [*bound, sys.executable, str(Path(__file__).absolute()), "--try", task], "/"
    )
    if done is None:
        return None
    if done.returncode:
        return {"change": change, "gain_share": 0.0, "is_gain": False, "error": done.stderr[-2000:]}
    result: dict[str, Any] = json.loads(done.stdout)
    shares = [
        1 - after / before
        for before, after in zip(result["without_s"], result["with_s"], strict=True)
    ]
    return result | {"is_gain": min(shares) > MISSED_SHARE}


def try_alternative(task: str) -> None:
    from tutti.profile.try_advice import try_change

    program, change, step_s, out, pairs = json.loads(task)
    print(json.dumps(try_change(program, change, step_s, Path(out), pairs)))


def text(row: dict[str, Any]) -> str:
    name = f"{row['workload']:<36}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    if (tried := row["tried"]) is None:
        others = ", ".join(f"{100 * each['gain_share']:+.0f} %" for each in row["alternatives"])
        offered = ", ".join(each["id"] for each in row["advice"]) or "no advice"
        verdict = "MISSED" if row["missed"] else "right"
        return f"{name} {offered}; alternatives gain {others or 'nothing known'}: {verdict}"
    low, high = (1e3 * seconds for seconds in tried["predicted_gain_s_band"])
    gain, quartiles = tried["gain_s"]["p50"], tried["gain_s"]["quartiles"]
    verdict = "within" if row["within"] else "OUTSIDE"
    return (
        f"{name} {tried['id']:<12} step {1e3 * row['step_s']:6.1f} ms, predicted {low:5.1f} to "
        f"{high:5.1f}, measured {1e3 * gain:5.1f} ({1e3 * quartiles[0]:.1f} to "
        f"{1e3 * quartiles[1]:.1f}): {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--minutes", type=float, default=9, help="no workload ends later")
    parser.add_argument("--only", help="names of workloads, separated by commas")
    parser.add_argument("--cpus", type=int, default=4, help="CPUs of each workload")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs of each alternative")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--try", dest="task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        start_ranks(WORKLOADS[options.train], steps=1000)
        return
    if options.task:
        try_alternative(options.task)
        return
    names = options.only.split(",") if options.only else list(WORKLOADS)
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"--only {unknown[0]} is unknown. Known workloads: {', '.join(WORKLOADS)}")
    present = sorted(os.sched_getaffinity(0))
    size = min(options.cpus, len(present))
    free: SimpleQueue[list[int]] = SimpleQueue()
    for first in range(0, len(present) - size + 1, size):
        free.put(present[first : first + size])
    began, rows = time.monotonic(), []
    end = began + 60 * options.minutes
    server = str(Path(tempfile.mkdtemp()) / "fork_server")
    os.environ |= {"FORK_SERVER": server, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in path if entry)
    forks = subprocess.Popen([sys.executable, str(FORKED), "serve", server])
    while not Path(server).exists():
        time.sleep(0.1)

    def run(name: str) -> None:
        cpus = free.get()
        try:
            row = measure(name, cpus, options.pairs, end) if time.monotonic() < end else None
        except Exception as error:  # the other workloads still run
            row = {"workload": name, "error": repr(error)}
        finally:
            free.put(cpus)
        if row is None:
            return
        rows.append(row)
        print(text(row), flush=True)
        if options.json:  # after each row, so that the rows so far outlive the benchmark
            write(options.json, rows, len(names), len(present), time.monotonic() - began)

    with ThreadPoolExecutor(free.qsize()) as pool:
        list(pool.map(run, names))
    forks.kill()
    shutil.rmtree(Path(server).parent)
    print(json.dumps(summarize(rows, len(names), time.monotonic() - began)))


def summarize(rows: list[dict[str, Any]], planned: int, seconds: float) -> dict[str, Any]:
    tried = [row for row in rows if row.get("tried")]
    return {
        "planned": planned,
        "workloads": len(rows),
        "tried": len(tried),
        "within": sum(row["within"] for row in tried),
        "none_offered": sum("missed" in row for row in rows),
        "missed": sum(row.get("missed", False) for row in rows),
        "repeats_present_setting": sum(bool(row.get("repeats_present_setting")) for row in rows),
        "failed": sum("error" in row for row in rows),
        "seconds": seconds,
    }


def write(path: Path, rows: list[dict[str, Any]], planned: int, cpus: int, seconds: float) -> None:
    import torch

    machine = {
        "cpu": _cpu_name(),
        "cpus": cpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    summary = summarize(list(rows), planned, seconds)
    content = {
        "schema": "tutti.benchmarks.advice_accuracy/1",
        "command": sys.argv,
        "machine": machine,
        "summary": summary,
        "rows": list(rows),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
