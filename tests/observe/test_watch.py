"""tutti watch names late ranks and their causes, and reports what somebody should look at."""

import http.server
import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import watched_program
from hypothesis import given
from hypothesis import strategies as st

from tutti.observe import ring_reader
from tutti.observe.ring_reader import ENDED, Group, Operation, Process, Step
from tutti.observe.step_split import PARTS, StepTable, find_stragglers, split_steps, tabulate
from tutti.observe.watch import JobWatch
from tutti.observe.watch_history import (
    History,
    growing_memory,
    loss_spike,
    slower_than_before,
)
from tutti.observe.watch_server import prometheus_text
from worlds import run_tutti, start_warm

# -- made-up jobs ----------------------------------------------------------------------------------


def operation(
    number: int, entered: float, completed: float, step: int, kind: str = "all_reduce", **more: Any
) -> Operation:
    values = {
        **{"number": number, "kind": kind, "group": "0|0,1", "sequence": number},
        **{"dtype": "float32", "shape": (1000,), "elements": 1000, "peer": -1, "tag": -1},
        **{"reduction": "sum", "device": "cpu", "state": "completed", "site": "", "thread": 7},
        **{"step": step - 1, "entered": entered, "completed": completed},
    }
    return Operation(**(values | more))


def process(
    rank: int, world: int, operations: list[Operation], steps: list[Step], **more: Any
) -> Process:
    ranks = tuple(range(world))
    values: dict[str, Any] = {
        **{"pid": 7, "rank": rank, "world_size": world, "worker": -1, "parent": 1, "host": "a"},
        **{"job": "job", "command": "train.py", "backend": "gloo", "started": 0.0, "time": 0.0},
        **{"clock_offset": 1e9, "alive": True, "state": "S", "exit_state": 0, "error": ""},
        **{"exited_ago": None, "steps": steps[-1].number if steps else 0, "batches": 0},
        **{"loaders_ended": 0, "entered": len(operations), "completed": len(operations)},
        **{"step_age": 0.0, "phase": "other", "phase_age": 0.0, "gil_age": 0.0},
        **{"sample_age": 0.0, "cpu_seconds": 0.0, "io_bytes": 0, "memory_bytes": 1 << 28},
        "groups": {"0|0,1": Group("0|0,1", "", "gloo", rank, world, 0, ranks)},
        **{"operations": tuple(operations), "step_history": tuple(steps)},
    }
    return Process(**(values | more))


def data_parallel_job(
    compute: np.ndarray[Any, Any],
    transfer: float = 0.01,
    inputs: np.ndarray[Any, Any] | None = None,
    first: int = 2,
    offsets: tuple[float, ...] | None = None,
) -> list[Process]:
    """Return the ranks of a DDP job: `compute[step, rank]` seconds, then two gradient buckets.

    The first bucket is entered after half of the computation, and moves meanwhile.
    """
    steps, ranks = compute.shape
    inputs = np.zeros_like(compute) if inputs is None else inputs
    offsets = offsets or (0.0,) * ranks
    began = np.full(ranks, 100.0)
    operations: list[list[Operation]] = [[] for _ in range(ranks)]
    history: list[list[Step]] = [[] for _ in range(ranks)]
    for k in range(steps):
        own = inputs[k] + compute[k]
        early, late = began + inputs[k] + compute[k] / 2, began + own
        done = max(early.max() + transfer, late.max() + transfer)
        ended = done + 0.001
        for rank in range(ranks):
            shift = -offsets[rank]
            for sequence, entered in ((2 * k + 1, early[rank]), (2 * k + 2, late[rank])):
                completed = (early.max() + transfer) if sequence % 2 else done
                operations[rank].append(
                    operation(
                        *(sequence, entered + shift, completed + shift, k + first),
                        asynchronous=True,
                    )
                )
            phases = {"input": float(inputs[k, rank]), "optimizer": 0.001}
            step = Step(k + first, began[rank] + shift, ended + shift, phases, 0.0)
            history[rank].append(step)
        began = np.full(ranks, ended)
    return [
        process(
            *(rank, ranks, operations[rank], history[rank]),
            host=f"host{rank}" if any(offsets) else "a",
            clock_offset=1e9 + offsets[rank],
        )
        for rank in range(ranks)
    ]


TIMES = st.floats(0.001, 0.5)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=5), st.floats(-50, 50))
def test_the_wait_of_a_rank_is_the_time_until_the_last_one_enters(
    rows: list[tuple[float, ...]], offset: float
) -> None:
    """The last bucket counts once, although the buckets overlap; hosts have different clocks."""
    compute = np.array(rows)
    found = split_steps(data_parallel_job(compute, 0.01, offsets=(0.0, offset, -offset)))
    assert len(found) == compute.size
    for each in found:
        own = compute[each.step - 2, each.rank]
        last = compute[each.step - 2].max()
        assert each.parts["wait"] == pytest.approx(last - own, abs=1e-5)
        assert each.parts["exposed"] == pytest.approx(0.01, abs=1e-5)
        assert each.parts["compute"] == pytest.approx(own, abs=1e-5)
        assert each.own == pytest.approx(own + 0.011, abs=1e-5)
        for rank in each.waited_for:
            assert compute[each.step - 2, rank] == pytest.approx(last, abs=1e-5)


KINDS = ("all_reduce", "broadcast", "reduce", "send", "recv", "recv_any_source", "barrier")


@given(st.data())
def test_the_parts_of_any_step_add_up_to_the_step(data: st.DataObject) -> None:
    ranks = []
    for rank in range(2):
        steps = [Step(n, n, n + 1.0, data.draw(st.just({"input": 0.3})), 0.1) for n in (2, 3)]
        operations = [
            operation(
                number,
                entered := data.draw(st.floats(2.0, 4.0)),
                data.draw(st.sampled_from([0.0, entered, entered + 0.2, entered + 3.0])),
                int(entered),
                data.draw(st.sampled_from(KINDS)),
                sequence=data.draw(st.integers(1, 3)),
                asynchronous=data.draw(st.booleans()),
                device=data.draw(st.sampled_from(["cpu", "cuda"])),
                peer=data.draw(st.integers(-1, 1)),
            )
            for number in range(data.draw(st.integers(0, 6)))
        ]
        ranks.append(process(rank, 2, operations, steps))
    for each in split_steps(ranks):
        assert sum(each.parts.values()) == pytest.approx(each.seconds)
        assert min(each.parts.values()) >= 0.0


def test_a_stage_of_a_pipeline_waits_for_its_input_and_not_for_its_receiver() -> None:
    steps = [Step(2, 0.0, 1.0, {}, 0.0)]
    first = process(0, 2, [operation(1, 0.6, 0.95, 2, "send", peer=1)], steps)
    second = process(1, 2, [operation(1, 0.1, 0.7, 2, "recv", peer=0)], steps)
    sender, receiver = split_steps([first, second])
    assert sender.parts["wait"] == 0 and sender.own == 1.0
    assert receiver.parts["wait"] == pytest.approx(0.5)
    assert receiver.parts["exposed"] == pytest.approx(0.1)


def test_synchronous_operations_and_roots() -> None:
    """Between two synchronous all-reduces, both ranks wait for each other, in turn."""
    steps = [Step(2, 0.0, 1.0, {}, 0.0)]
    slow_first = [operation(1, 0.4, 0.5, 2), operation(2, 0.6, 0.9, 2)]
    slow_last = [operation(1, 0.1, 0.5, 2), operation(2, 0.8, 0.9, 2)]
    found = split_steps([process(0, 2, slow_first, steps), process(1, 2, slow_last, steps)])
    assert [each.parts["wait"] for each in found] == pytest.approx([0.2, 0.3])
    assert [each.parts["exposed"] for each in found] == pytest.approx([0.2, 0.2])
    # The root of a broadcast does not wait. The other rank waits for the root only.
    root = process(0, 2, [operation(1, 0.5, 0.6, 2, "broadcast", peer=0)], steps)
    other = process(1, 2, [operation(1, 0.2, 0.6, 2, "broadcast", peer=0)], steps)
    assert [each.parts["wait"] for each in split_steps([root, other])] == pytest.approx([0, 0.3])


# -- late ranks ------------------------------------------------------------------------------------


def table(own: np.ndarray[Any, Any], part: str = "compute") -> StepTable:
    """Return a table in which every rank waits for the slowest one."""
    parts = np.zeros((*own.shape, len(PARTS)))
    parts[:, :, PARTS.index(part)] = own
    parts[:, :, PARTS.index("wait")] = own.max(axis=1, keepdims=True) - own
    return StepTable(tuple(range(len(own))), tuple(range(own.shape[1])), parts)


@given(st.integers(0, 2**32 - 1), st.integers(2, 64), st.sampled_from([0.2, 1.0]))
def test_noise_names_no_rank(seed: int, ranks: int, scatter: float) -> None:
    random = np.random.default_rng(seed)
    assert find_stragglers(table(0.05 * random.lognormal(0, scatter, (200, ranks)))) == []


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 8, 64]), st.sampled_from(PARTS[3:]))
def test_a_late_rank_is_named_with_its_cause(seed: int, ranks: int, part: str) -> None:
    random = np.random.default_rng(seed)
    own = 0.05 * random.lognormal(0, 0.1, (100, ranks))
    late = int(random.integers(ranks))
    job = table(own)
    job.parts[:, late, PARTS.index(part)] += 0.08
    (found,) = find_stragglers(job)
    assert (found.rank, found.cause, found.period) == (late, part, None)
    assert found.seconds == pytest.approx(0.08, rel=0.15)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.sampled_from([2, 5, 16]))
def test_every_nth_step_is_named_with_its_period(seed: int, period: int, ranks: int) -> None:
    random = np.random.default_rng(seed)
    own = 0.02 * random.lognormal(0, 0.3, (300, ranks))
    first = int(random.integers(period))
    own[first::period, 1] += 0.1
    # The scheduler delays another rank in a few other steps.
    own[(first + 1 + period * random.integers(300 // period - 1, size=4)), 0] += 0.2
    found = next(each for each in find_stragglers(table(own)) if each.rank == 1)
    assert found.period == period
    assert found.seconds == pytest.approx(0.1, rel=0.15)


def test_too_few_steps_say_nothing() -> None:
    own = np.full((19, 2), 0.2)
    own[:, 1] += 0.2
    assert find_stragglers(table(own)) == []
    assert find_stragglers(tabulate([])) == []
    assert find_stragglers(table(own[:, :1])) == []


# -- alerts ----------------------------------------------------------------------------------------


def watched(jobs: list[list[Process]], seconds: float = 1.0) -> JobWatch:
    watch = JobWatch(None)
    for number, processes in enumerate(jobs):
        watch.add(processes, 1e9 + number * seconds)
    watch.close()
    return watch


def test_alerts_are_raised_once_for_each_cause() -> None:
    random = np.random.default_rng(0)
    compute = 0.08 * random.lognormal(0, 0.05, (900, 3))
    healthy = watched([data_parallel_job(compute)])
    assert healthy.alerts == [] and healthy.state["stragglers"] == []
    assert healthy.state["ranks"][0]["parts_s"]["exposed"] == pytest.approx(0.01, rel=0.01)
    compute[800:, 2] += 0.1
    once = watched([data_parallel_job(compute)] * 3)
    assert [(alert.kind, alert.rank) for alert in once.alerts] == [
        ("straggler", 2),
        ("throughput", None),
    ]
    starving = watched([data_parallel_job(compute[:200], inputs=np.full((200, 3), 0.05))])
    assert [alert.kind for alert in starving.alerts] == ["input"]


class _Nvml:
    """Two GPUs. The second one runs at half of its clock, because its power is capped."""

    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetName = staticmethod(lambda gpu: "GPU")
    nvmlDeviceGetUtilizationRates = staticmethod(lambda gpu: SimpleNamespace(gpu=90))
    nvmlDeviceGetMemoryInfo = staticmethod(lambda gpu: SimpleNamespace(used=1 << 30))
    nvmlDeviceGetPowerUsage = staticmethod(lambda gpu: 700_000)
    nvmlDeviceGetTemperature = staticmethod(lambda gpu, sensor: 60 + gpu)
    nvmlDeviceGetPcieThroughput = staticmethod(lambda gpu, way: 1000)
    nvmlDeviceGetClockInfo = staticmethod(lambda gpu, kind: 1980 // (1 + gpu))
    nvmlDeviceGetMaxClockInfo = staticmethod(lambda gpu, kind: 1980)
    nvmlDeviceGetCurrentClocksEventReasons = staticmethod(lambda gpu: 4 * gpu)

    @staticmethod
    def nvmlDeviceGetComputeRunningProcesses(gpu: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=100 + gpu)]


def test_the_load_of_gpus_is_shown_and_a_slow_gpu_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tutti.observe.watch.nvml", lambda: nullcontext(_Nvml))
    compute = np.full((60, 2), 0.08)
    compute[:, 1] += 0.05
    job = data_parallel_job(compute)
    here = {"host": os.uname().nodename}
    job = [replace(each, pid=100 + each.rank, **here) for each in job]
    job = [
        replace(each, operations=tuple(replace(o, thread=each.pid) for o in each.operations))
        for each in job
    ]
    watch = watched([job])
    (late,) = watch.state["stragglers"]
    gpu = watch.state["gpus"][1]
    assert (gpu["power_w"], gpu["temperature_c"], gpu["throttle"]) == (700, 61, ["sw_power_cap"])
    assert gpu["utilisation"] == 0.9 and gpu["pcie_bytes_per_s"] == 2e6
    assert late["reason"] == "gpu_throttled" and "990 of 1980 MHz" in late["text"]
    assert 'tutti_gpu_power_w{job="",gpu="1"} 700' in prometheus_text(watch.state)


def test_throughput_is_compared_with_the_past_of_the_job() -> None:
    def lengths(*parts: tuple[int, float]) -> list[tuple[float, float]]:
        seconds = [length for count, length in parts for _ in range(count)]
        return list(zip(np.cumsum(seconds).tolist(), seconds, strict=True))

    assert slower_than_before(lengths((2000, 0.1))) is None
    assert slower_than_before(lengths((2000, 0.1), (200, 0.105))) is None
    assert "20 %" in (slower_than_before(lengths((2000, 0.1), (300, 0.125))) or "")
    assert slower_than_before(lengths((2000, 0.1), (200, 0.05))) is None
    assert slower_than_before(lengths((100, 0.1), (200, 0.5))) is None  # there is no past
    assert slower_than_before([]) is None


def test_memory_that_grows_steadily_is_named() -> None:
    steady = np.linspace(1e9, 1.2e9, 120)
    start_up = np.minimum(1e9, np.linspace(1e8, 3e9, 120))
    noise = 1e9 + 1e7 * np.random.default_rng(0).standard_normal(120)
    found = growing_memory(list(np.stack([start_up, steady, noise], axis=1)))
    assert [index for index, _, _ in found] == [1]
    assert growing_memory([np.array([1.0])]) == []


def test_a_spike_of_the_loss_is_named() -> None:
    losses = [(step, 2.0 + 0.01 * (step % 5)) for step in range(100)]
    assert loss_spike(losses) is None
    assert loss_spike([*losses, (100, 9.0)]) == (100, 9.0, pytest.approx(2.02))
    assert loss_spike(losses[:10]) is None


def test_a_run_directory_is_shown_without_records(tmp_path: Path) -> None:
    """A run that has ended is read from its metrics. A line that is cut off is left out."""
    (tmp_path / "metrics").mkdir()
    (tmp_path / "recipe.toml").write_text("[length]\nsteps = 100\n")
    for rank in range(2):
        rows = [{"step": s, "time": 1e9 + s, "loss": 2.0 - s / 100} for s in range(60)]
        rows.append({"step": 59, "time": 1e9 + 60, "seconds_per_step": 0.5, "wait_fraction": 0.25,
                     "samples_per_s": 64.0, "peak_memory_bytes": 1e9})  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "metrics" / f"rank{rank}.jsonl").write_text(text + '{"step": 60, "ti')
    watch = JobWatch(None, tmp_path)
    state = watch.poll()
    assert (state["state"], state["step"], state["total_steps"]) == ("ended", 60, 100)
    assert state["loss"] == pytest.approx(1.41) and state["samples_per_s"] == 64
    assert [row["parts_s"]["wait"] for row in state["ranks"]] == [0.125, 0.125]
    assert watch.alerts == []
    with (tmp_path / "metrics" / "rank0.jsonl").open("a") as file:
        file.write('me": 1}\n{"step": 61, "time": 1000000061, "loss": NaN}\n')
    watch.poll()
    assert [alert.kind for alert in watch.alerts] == ["loss"] and watch.state["loss"] is None
    watch.close()
    done = run_tutti("watch", tmp_path, "--json", tmp_path / "watch.json")
    assert done.returncode == 0 and "64 samples/s" in done.stdout, done.stderr
    assert "not finite in step 61" in done.stderr
    content = json.loads((tmp_path / "watch.json").read_text())
    assert content["schema"] == "tutti.watch/1" and len(content["ranks"]) == 2


def test_history_keeps_means_of_old_rows() -> None:
    history = History(length=64, levels=3, factor=4)
    for number in range(5000):
        history.add(number, np.array([number, np.nan if number % 2 else 1.0]))
    first, last = history.limits()
    assert last == 4999 and first > 0  # the oldest rows are dropped
    places, rows = history.window(0, 1e9, 50)
    assert len(places) <= 50 and rows.shape == (len(places), 2)
    assert (np.diff(rows[:, 0]) > 0).all() and (rows[:, 1] == 1.0).all()
    exact, values = history.window(4990, 4999, 100)
    assert exact == list(range(4990, 5000)) and values[:, 0].tolist() == exact
    assert history.window(6000, 7000, 10)[0] == []


def test_a_job_without_progress_is_called_stalled() -> None:
    """An evaluation makes no steps, but enters operations or changes phases."""
    quiet = {"step_age": 100.0, "phase_age": 100.0, "time": 1000.0}
    hanging = [replace(each, **quiet) for each in data_parallel_job(np.full((30, 2), 0.1))]
    assert watched([hanging]).state["state"] == "stalled"
    for alive in ({"phase_age": 1.0}, {"step_age": 1.0}, {"time": 110.0}):
        assert watched([[replace(hanging[0], **alive), hanging[1]]]).state["state"] == "running"


def test_a_job_whose_records_are_removed_has_ended() -> None:
    job = data_parallel_job(np.full((30, 2), 0.1))
    watch = watched([job, []])
    assert watch.state["state"] == "ended" and watch.ended
    assert [row["step"] for row in watch.state["ranks"]] == [31, 31]
    failed = [replace(job[0], exit_state=2, alive=False, error="ValueError: no @ a.py:1 in f")]
    watch = watched([[*failed, replace(job[1], exit_state=ENDED, alive=False)]])
    assert watch.state["state"] == "failed"
    assert "rank 0 failed: ValueError: no" in [text for _, text in watch.events]


# -- real ranks ------------------------------------------------------------------------------------

PHASES: dict[str, list[tuple[str, int, int, int]]] = {
    "gloo": [
        *(("none", 0, 180, 0), ("input", 1, 45, 80), ("compute", 2, 50, 70)),
        *(("periodic", 0, 140, 80), ("collection", 1, 45, 0)),
    ],
    "shm": [("compute", 1, 55, 70), ("input", 0, 50, 90)],
}
RANKS = {"gloo": 3, "shm": 2}


@contextmanager
def running(folder: Path) -> Iterator[dict[str, Path]]:
    """Start watched_program.py on both backends. Yield the folders of the rings."""
    processes, folders = [], {}
    for backend, phases in PHASES.items():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        folders[backend] = ring_reader.job_folder(f"127.0.0.1-{port}")
        (folder / backend).mkdir()
        for rank in range(RANKS[backend]):
            sizes = {"WORLD_SIZE": RANKS[backend], "LOCAL_WORLD_SIZE": RANKS[backend]}
            env = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, **sizes}
            env |= {"MASTER_ADDR": "127.0.0.1", "TUTTI_OBSERVE": 1, "OMP_NUM_THREADS": 1}
            words = [watched_program.__file__, backend, folder / backend, json.dumps(phases)]
            processes.append(start_warm(words, {name: str(v) for name, v in env.items()}))
    try:
        yield folders
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            with process:
                pass
        for rings in folders.values():
            ring_reader.remove_job(rings.name)


def wait_for(condition: Any, what: str) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end, f"not after 90 s: {what}"
        time.sleep(0.3)


@contextmanager
def listener() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the URL of a server, and the JSON that is posted to it."""
    posted: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/alerts", posted
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.timeout(200)
def test_planted_delays_of_real_ranks_are_named(tmp_path: Path) -> None:
    with running(tmp_path) as folders, listener() as (url, posted):
        rings = folders["gloo"]
        steps = sum(phase[2] for phase in PHASES["gloo"])
        wait_for(lambda: any(rings.glob("*.ring")), "the first ring")
        live = JobWatch(rings)
        healthy_until = 0.0

        def ended() -> bool:
            nonlocal healthy_until
            if live.poll()["step"] < PHASES["gloo"][0][2]:
                healthy_until = time.time()
            return all(
                len(list((tmp_path / name).glob("*.json"))) == RANKS[name] for name in folders
            )

        wait_for(ended, "the last step")
        live.poll()
        live.close()
        # Live: an alert for every planted delay, and none before the first one.
        found = {alert.rank for alert in live.alerts if alert.kind == "straggler"}
        assert found == {0, 1, 2}, live.alerts
        assert min(alert.time for alert in live.alerts) > healthy_until
        assert live.state["state"] == "running" and live.state["step"] == steps

        # In the rings: rank, cause, period and milliseconds of every planted delay.
        for name, folder in folders.items():
            first = 1
            all_steps = split_steps(ring_reader.read_job(folder, 4096, 4096))
            for number, (kind, rank, count, _) in enumerate(PHASES[name]):
                # The first steps of a phase are left out: the loader starts in the first one.
                chosen = [each for each in all_steps if first + 2 < each.step <= first + count - 1]
                first += count
                late = find_stragglers(tabulate(chosen))
                if kind == "none":
                    assert late == [], (name, kind, late)
                    continue
                measured = json.loads((tmp_path / name / f"{rank}.json").read_text())[number]
                print(name, kind, measured, late)
                period = watched_program.PERIOD if kind == "periodic" else None
                cause = "compute" if kind == "periodic" else kind
                assert [(s.rank, s.cause, s.period) for s in late] == [(rank, cause, period)]
                assert late[0].seconds == pytest.approx(measured, rel=0.15)

        # In a pipe: a line per look at the job. With a page, the view ends with Ctrl-C.
        command = ["-m", "tutti", "watch", rings.name, "--every", "0.2", "--page"]
        with start_warm(command) as view:
            assert view.stdout is not None and view.stderr is not None
            page = view.stdout.readline()
            assert page.startswith("page: http://127.0.0.1:"), page or view.stderr.read()
            line = view.stdout.readline()
            assert line.startswith(f"step {steps}  ") and "late: rank 1" in line, line
            address = page.split()[1].replace("/?", "/metrics?")
            with urllib.request.urlopen(address, timeout=20) as answer:
                metrics = answer.read().decode()
            assert f'tutti_rank_up{{job="{rings.name}",rank="2"' in metrics
            for process in ring_reader.read_job(rings, 0, 0):
                os.kill(process.pid, signal.SIGKILL)
            while "failed" not in line:
                line = view.stdout.readline()
            view.send_signal(signal.SIGINT)
            out, err = view.communicate(timeout=60)
        assert view.returncode == 0 and "late: spends" in out, err
        text = r"tutti watch: alert: rank 1 spends .* ms longer in garbage collection.*\n"
        assert re.fullmatch(text, err), err

        # The rings of the dead job can still be opened. Alerts go to a command and a webhook.
        touched = tmp_path / "alert; touch no"
        save = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
        save_alert = shlex.join([sys.executable, "-c", save, str(touched), "{text}"])
        outlets = ["--alert-command", save_alert, "--webhook", url]
        again = run_tutti("watch", rings.name, *outlets, "--json", tmp_path / "watch.json")
        assert again.returncode == 0 and again.stdout.startswith(f"step {steps}  failed")
        alert = touched.read_text()
        assert alert.startswith("rank 1 spends") and posted[0]["text"] == alert
        assert posted[0]["kind"] == "straggler" and posted[0]["job"] == rings.name
        state = json.loads((tmp_path / "watch.json").read_text())
        assert state["state"] == "failed" and state["stragglers"][0]["rank"] == 1
        assert len(state["events"]) >= RANKS["gloo"] and state["schema"] == "tutti.watch/1"


def test_wrong_usage_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    for arguments, message in (
        (["no-such-job"], "no-such-job is no job of this user"),
        ([tmp_path, "--every", "0"], "--every must be seconds above 0"),
        ([tmp_path, "--port", "70000"], "--port must be at most 65535, got 70000"),
        ([tmp_path, "--total-steps", "0"], "--total-steps must be at least 1, got 0"),
        ([tmp_path, "--webhook", "ftp://host"], "--webhook must be a URL with http"),
        ([tmp_path, "--alert-command", "no-such-program {text}"], "'no-such-program' is no"),
        ([tmp_path, "--alert-command", "echo 'open"], "--alert-command"),
        ([tmp_path, "--pages"], "did you mean --page?"),
    ):
        done = run_tutti("watch", *arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
