"""tutti why as a command: jobs, hosts, dumps, wrong usage, and explanations without being asked."""

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hanging_programs import line_of
from planted_hangs import PROGRAM, Case, running, wait_until_still

from hosts import hosts_missing, network
from tutti.observe import ring_reader, why
from worlds import TUTTI, clean_environment, run_command, run_tutti, run_warm

PAUSE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(8):
    dist.all_reduce(torch.ones(4))
    if step == 4 and dist.get_rank() == 1:
        time.sleep(9)  # the pause
    time.sleep(1.5 * (step > 4))
"""


def test_a_job_is_found_by_name_and_pid_and_written_as_json(tmp_path: Path) -> None:
    with running([Case("plain", "gloo", "sleeps")]) as folders:
        (folder,) = folders.values()
        wait_until_still([folder], seconds=1.0)
        pid = next(iter(folder.glob("*.ring"))).stem
        file = tmp_path / "why.json"
        done = run_tutti("why", pid, "--json", file, "--hang-after", "0.1", "--stacks")
        listed = run_tutti("why", "--jobs")
        patient = run_tutti("why", folder.name, "--hang-after", "1000")
        # Only the owner may read the records.
        modes = {oct(path.stat().st_mode & 0o777) for path in folder.glob("*.ring")}
        folder_mode = oct(folder.stat().st_mode & 0o777)

    assert done.returncode == 1, done.stderr
    line = line_of("sleeps")
    assert "Rank 1" in done.stdout and f"{PROGRAM.name}:{line}" in done.stdout.replace(
        "\n    ", " "
    )
    content = json.loads(file.read_text())
    assert content["schema"] == "tutti.why/1" and content["hang"] and content["environment"]
    culprit = content["culprits"][0]
    assert culprit["rank"] == 1 and culprit["line"] == line and "all_reduce" in culprit["operation"]
    assert [row["state"] for row in content["ranks"]] == ["blocked", "sleeping", "blocked"]
    assert [row["waits_for"] for row in content["ranks"]] == [[1], [], [1]]
    assert f"{folder.name}  3 of 3 ranks run" in listed.stdout
    assert patient.returncode == 0 and patient.stdout.startswith("Not a hang so far")
    assert modes == {"0o600"} and folder_mode == "0o700"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_records_of_another_user_are_not_read(tmp_path: Path) -> None:
    with running([Case("plain", "gloo", "sleeps")]) as folders:
        (folder,) = folders.values()
        wait_until_still([folder], seconds=0.5)
        ring = next(iter(folder.glob("*.ring")))
        assert ring_reader.read_ring(ring) is not None
        os.chown(ring, 12345, 12345)
        assert ring_reader.read_ring(ring) is None


def test_tutti_run_explains_a_hang_and_says_when_the_job_goes_on(tmp_path: Path) -> None:
    script, logs = tmp_path / "pause.py", tmp_path / "logs"
    script.write_text(PAUSE)
    command = ["run", "-n", "2", "--device", "cpu", "--hang-after", "4", "--log-dir", logs, script]
    done = run_tutti(*command)
    assert done.returncode == 0, done.stderr
    line = PAUSE.splitlines().index("        time.sleep(9)  # the pause") + 1
    assert "tutti why: Rank 1" in done.stderr and f"pause.py:{line}" in done.stderr
    assert "the job makes progress again" in done.stderr
    content = json.loads((logs / "why.json").read_text())
    assert content["culprits"][0]["rank"] == 1 and content["culprits"][0]["line"] == line
    # The records of a job that ended normally are removed.
    assert not ring_reader.job_folder(content["job"]).exists()


def test_healthy_jobs_with_long_pauses_are_not_accused() -> None:
    """Rank 0 pauses for up to 2 s, as in an evaluation or a checkpoint, and others wait."""
    cases = [
        Case(program, backend, "pauses")
        for program, backend in (("ddp", "gloo"), ("ddp", "shm"), ("fsdp2", "gloo"))
    ] * 2
    with running(cases) as folders:
        watches = [why.HangWatch(folder.name, hang_after=6.0) for folder in folders.values()]
        end = time.monotonic() + 15
        while time.monotonic() < end:
            for watch in watches:
                explanation = watch.tick()
                assert explanation is None or not explanation.hang, explanation
            time.sleep(0.5)
        steps = [min(each.steps for each in ring_reader.read_job(f)) for f in folders.values()]
        assert min(steps) > 5  # the jobs have passed several pauses


@pytest.mark.parametrize("words", [["no-such-job"], ["--via", "ssh", "x"], ["--hang-after", "-1"]])
def test_wrong_usage_is_one_line(words: list[str]) -> None:
    done = run_tutti("why", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout


# -- several hosts ---------------------------------------------------------------------------------


@pytest.mark.skipif(hosts_missing() is not None, reason=str(hosts_missing()))
def test_a_partition_and_a_frozen_host_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "while True:\n"
        "    dist.all_reduce(torch.ones(1 << 16))\n"
        "    time.sleep(0.05)\n"
    )
    with network(2) as made:
        enter = tmp_path / "enter"
        lines = ["#!/bin/sh", "host=$1", "shift", f"[ -e {tmp_path}/frozen_$host ] && sleep 60"]
        for host in made.hosts:
            pid = host._init.pid
            lines.append(
                f"[ $host = {host.name} ] && exec nsenter --target {pid} --net --mount --uts --ipc "
                f'--pid -- env PATH={Path(sys.executable).parent}:$PATH "$@"'
            )
        enter.write_text("\n".join(lines))
        enter.chmod(0o755)
        via = f"{enter} {{host}}"
        folder = ring_reader.job_folder("10.77.0.1-29600")
        ranks = []
        for rank, host in enumerate(made.hosts):
            variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            env = {name: str(value) for name, value in variables.items()}
            env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29600", "TUTTI_OBSERVE": "1"}
            env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            output = (tmp_path / f"{host.name}.log").open("w")
            command = [sys.executable, str(script)]
            env = clean_environment() | env
            ranks.append(host.popen(command, env=env, stdout=output, stderr=output))
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = why.explain_job(folder, ["n1", "n2"], via, timeout=20)
            if found.kind == "progress" and len(found.ranks) == 2:
                break
        assert found.kind == "progress" and not found.hang, found.verdict

        (tmp_path / "frozen_n2").touch()  # n2 does not answer any more
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(2)
        found = why.explain_job(folder, ["n1", "n2"], via, hang_after=1.0)
        assert (found.kind, found.hang) == ("host_silent", True), found.verdict
        assert "n2" in found.verdict and [each.rank for each in found.culprits] == [1]
        (tmp_path / "frozen_n2").unlink()
        ranks[1].send_signal(signal.SIGCONT)

        made.hub.run(["ip", "link", "set", "n2", "down"])
        time.sleep(4)
        found = why.explain_job(folder, ["n1", "n2"], via, hang_after=1.0, timeout=20)
        assert (found.kind, found.hang) == ("partition", True), found.verdict
        assert "n1 and n2" in found.verdict


# -- dumps of the flight recorder ------------------------------------------------------------------


def _entry(
    group: str, sequence: int, name: str, state: str, line: int, **more: Any
) -> dict[str, Any]:
    return {
        "frames": [{"name": "train", "filename": "/home/user/train.py", "line": line}],
        "pg_id": int(group),
        "process_group": (group, "tp" if group == "1" else "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1_000_000_000 * (sequence + 1),
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "state": state,
        "time_discovered_completed_ns": None,
        **more,
    }


def _write_dumps(folder: Path, entries: dict[int, list[dict[str, Any]]]) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    config["1"] = {"name": "1", "desc": "tp", "ranks": "[2, 3]"}
    for rank, rows in entries.items():
        content = {"version": "2.10", "pg_config": config, "entries": rows}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))


def test_dumps_name_the_rank_that_has_not_entered_an_operation(tmp_path: Path) -> None:
    done = [_entry("0", n, "all_reduce", "completed", 10 + n) for n in (1, 2)]
    waiting = [*done, _entry("0", 3, "all_reduce", "started", 13)]
    in_tp = [*done, _entry("1", 1, "_all_gather_base", "started", 99)]
    _write_dumps(tmp_path, {0: waiting, 1: waiting, 2: in_tp, 3: done})
    found = run_tutti("why", "--dumps", tmp_path, "--json", tmp_path / "why.json")
    content = json.loads((tmp_path / "why.json").read_text())
    assert found.returncode == 1
    assert [each["rank"] for each in content["culprits"]] == [3]  # rank 2 itself waits for rank 3
    assert content["culprits"][0]["line"] == 12
    assert {row["rank"]: row["waits_for"] for row in content["ranks"]}[2] == [3]

    _write_dumps(
        tmp_path, {1: [*done, _entry("0", 3, "broadcast", "started", 77)], 2: waiting, 3: waiting}
    )
    content = json.loads(_explain_dumps(tmp_path))
    assert content["kind"] == "mismatch" and content["culprits"][0]["line"] == 77


def _explain_dumps(folder: Path) -> str:
    run_tutti("why", "--dumps", folder, "--json", folder / "why.json")
    return (folder / "why.json").read_text()


def test_dumps_that_torch_wrote_on_gloo_are_read(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "for _ in range(3): dist.all_reduce(torch.ones(4))\n"
        "if rank == 0: dist.all_reduce(torch.ones(4), async_op=True)\n"
        "time.sleep(0.5)\n"
        "dump = torch._C._distributed_c10d._dump_fr_trace()\n"
        "open(f'{sys.argv[1]}/dump_{rank}', 'wb').write(dump)\n"
        "os._exit(0)\n"
    )
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    run_tutti("run", "-n", "2", "--device", "cpu", program, dumps)
    assert sorted(path.name for path in dumps.iterdir()) == ["dump_0", "dump_1"]
    content = json.loads(_explain_dumps(dumps))
    assert [each["rank"] for each in content["culprits"]] == [1]
    assert "all_reduce #4 of the default group" in content["verdict"]


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was_executed",)


@pytest.mark.parametrize(
    "content",
    [pickle.dumps({"entries": [_Malicious()]}), b"\x80\x02}q\x00(X", b"{", b"", b"\x80\x02N."],
    ids=["code", "cut off", "JSON", "empty", "no dump"],
)
def test_a_wrong_dump_is_refused_and_runs_no_code(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace_0").write_bytes(content)
    done = run_warm(["-m", "tutti", "why", "--dumps", str(tmp_path)], cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "--dumps" in done.stderr
    assert not (tmp_path / "was_executed").exists()


def test_a_script_is_recorded_through_python_m_tutti_observe(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('planted')\n")
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": "29601"}
    done = run_command([sys.executable, "-m", "tutti.observe", script], env=env)
    assert done.returncode == 1 and "planted" in done.stderr
    assert "not recorded" not in done.stderr
    explained = run_command([*TUTTI, "why", "127.0.0.1-29601"])
    ring_reader.remove_job("127.0.0.1-29601")
    assert explained.returncode == 1 and "script.py:1" in explained.stdout
    missing = run_command([sys.executable, "-m", "tutti.observe", tmp_path / "none.py"])
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1
