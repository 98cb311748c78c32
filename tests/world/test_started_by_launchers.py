"""tutti under real launchers: torchrun, Open MPI, MPICH and Slurm, on one host and on two."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from hosts import hosts_missing, two_hosts
from slurm_cluster import SlurmCluster, slurm_cluster, slurm_missing
from tutti.world.launchers import expand_hosts
from worlds import TUTTI, clean_environment, run_command, run_tutti, run_warm

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
KEYS = {"rank", "local_rank", "node", "host", "device", "backend", "launcher", "cpus", "reasons"}
needs_slurm = pytest.mark.skipif(slurm_missing() is not None, reason=str(slurm_missing()))
needs_hosts = pytest.mark.skipif(hosts_missing() is not None, reason=str(hosts_missing()))


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def rows_in(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert content["schema"] == "tutti.world/1"
    assert content["command"][:2] == ["tutti", "world"] and "versions" in content["environment"]
    assert all(set(row) >= KEYS for row in content["rows"])
    return content["rows"]


def places(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["rank"], row["local_rank"], row["node"]) for row in rows]


def check(done: Any) -> None:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_plain_python_is_a_world_of_one_rank(tmp_path: Path) -> None:
    check(run_tutti("world", "--json", tmp_path / "w.json"))
    (row,) = rows_in(tmp_path / "w.json")
    assert (row["rank"], row["launcher"], row["device"]) == (0, "python", "cpu")


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("tutti", [*TUTTI, "run", "-n", 3, "-m"]),
        ("torchrun", [*TORCHRUN, "--standalone", "--nproc-per-node", 3, "-m"]),
        pytest.param(
            "openmpi",
            ["mpirun.openmpi", "--oversubscribe", "-np", 3, *TUTTI[:-1]],
            marks=needs("mpirun.openmpi"),
        ),
        pytest.param("mpich", ["mpirun.mpich", "-np", 3, *TUTTI[:-1]], marks=needs("mpirun.mpich")),
    ],
)
def test_three_ranks_on_one_host(tmp_path: Path, launcher: str, command: list[object]) -> None:
    check(run_command([*command, "tutti", "world", "--json", tmp_path / "w.json"], env=AS_ROOT))
    rows = rows_in(tmp_path / "w.json")
    assert places(rows) == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]
    assert {row["launcher"] for row in rows} == {launcher}
    assert "RANK" in rows[2]["reasons"]["rank"]


def test_torchrun_restarts_a_failed_world(tmp_path: Path) -> None:
    script = tmp_path / "fails_once.py"
    script.write_text(
        "import os, torch, torch.distributed as dist, tutti\n"
        "with tutti.init() as world:\n"
        "    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and world.rank == 1:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    dist.all_reduce(x)\n"
        "    print(f'sum {int(x)}\\n', end='')\n"
    )
    restart = ["--standalone", "--max-restarts", 1, "--nproc-per-node", 2, script]
    done = run_warm([*TORCHRUN[1:], *restart])
    check(done)
    assert done.stdout.count("sum 4") == 2


@needs_hosts
def test_torchrun_across_two_hosts(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        first, second = (
            host.popen(
                [
                    *TORCHRUN,
                    *("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)),
                    *("--master-addr", "n1", "--master-port", "29400"),
                    *("-m", "tutti", "world", "--json", str(tmp_path / "w.json")),
                ],
                env=clean_environment(),
            )
            for number, host in enumerate(hosts)
        )
        _, errors = first.communicate(timeout=90)
        second.communicate(timeout=90)
    assert first.returncode == 0 and second.returncode == 0, errors
    rows = rows_in(tmp_path / "w.json")
    assert places(rows) == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert [row["host"] for row in rows] == ["n1", "n1", "n2", "n2"]


@pytest.fixture(scope="module")
def cluster() -> Any:
    if slurm_missing() is not None:
        pytest.skip(str(slurm_missing()))
    with slurm_cluster() as running:
        yield running


def run_batch_job(cluster: SlurmCluster, script: Path) -> None:
    output = script.with_suffix(".out")
    sbatch = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=2", f"--output={output}"]
    job = cluster.run([*sbatch, str(script)]).stdout.strip()
    assert cluster.wait_for_job(job, timeout=90) == "COMPLETED", output.read_text()


def test_srun_on_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    world = [*TUTTI, "world", "--json", str(tmp_path / "w.json")]
    check(cluster.run(["srun", "-N2", "--ntasks-per-node=2", *world], timeout=90))
    rows = rows_in(tmp_path / "w.json")
    assert places(rows) == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert [row["host"] for row in rows] == ["n1", "n1", "n2", "n2"]
    assert {row["launcher"] for row in rows} == {"slurm"}
    assert rows[0]["reasons"]["master"] == "SLURM_STEP_NODELIST"


def test_a_step_on_some_nodes_of_a_job_uses_its_own_first_node(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    step = f"srun -N1 -n2 --nodelist=n2 {' '.join(TUTTI)} world --json {tmp_path}/w.json"
    script.write_text(f"#!/bin/bash\n{step}\n")
    run_batch_job(cluster, script)
    assert [row["host"] for row in rows_in(tmp_path / "w.json")] == ["n2", "n2"]


def test_the_batch_shell_is_a_world_of_one_and_does_not_wait(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{' '.join(TUTTI)} world --json {tmp_path}/w.json\n")
    run_batch_job(cluster, script)
    assert len(rows_in(tmp_path / "w.json")) == 1


def test_tutti_submit_slurm_runs_a_world_on_two_nodes(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    submit = ["submit", "slurm", "--nodes", "2", "--ranks-per-node", "1", "--time", "5:00"]
    where = ["--output", f"{tmp_path}/out", "--script", f"{tmp_path}/world.sbatch"]
    world = [*TUTTI, "world", "--json", f"{tmp_path}/w.json"]
    done = cluster.run([*TUTTI, *submit, *where, "--", *world])
    check(done)
    job = done.stdout.split()[-1]
    assert cluster.wait_for_job(job, timeout=90) == "COMPLETED", (tmp_path / "out").read_text()
    assert [row["host"] for row in rows_in(tmp_path / "w.json")] == ["n1", "n2"]


def test_torchrun_inside_srun_is_torchrun(cluster: SlurmCluster, tmp_path: Path) -> None:
    torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    world = ["--rdzv-endpoint", "n1:29401", "-m", "tutti", "world", "--json"]
    job = ["srun", "-N2", "--ntasks-per-node=1", *torchrun, *world, str(tmp_path / "w.json")]
    check(cluster.run(job, timeout=90))
    rows = rows_in(tmp_path / "w.json")
    assert {row["launcher"] for row in rows} == {"torchrun"}
    assert sorted(row["host"] for row in rows) == ["n1", "n2"]


@pytest.mark.parametrize("text", ["n[1-3]", "n[08-11,20]", "a,b[2-3]", "rack[1-2]n[01-02]"])
def test_node_lists_expand_as_scontrol_does(cluster: SlurmCluster, text: str) -> None:
    message = cluster.run(["scontrol", "show", "hostnames", text]).stdout.split()
    assert expand_hosts(text) == message


def test_a_rank_killed_under_srun_ends_the_others_on_both_nodes(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, torch, torch.distributed as dist, tutti\n"
        "with tutti.init() as world:\n"
        "    for step in range(100_000):\n"
        "        dist.all_reduce(torch.ones(1000))\n"
        "        if world.rank == 3 and step == 50:\n"
        "            os.kill(os.getpid(), 9)\n"
    )
    # Without --kill-on-bad-exit srun would not end the other ranks.
    srun = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, str(script)]
    done = cluster.run(srun, timeout=60)
    assert done.returncode != 0
    assert "rank 3 on n2 failed first" in done.stderr, done.stderr


@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_mpirun_inside_a_slurm_job_needs_no_master_address(
    cluster: SlurmCluster, flavour: str, tmp_path: Path
) -> None:
    if shutil.which(f"mpirun.{flavour}") is None:
        pytest.skip(f"mpirun.{flavour} is not installed")
    # From the hub, which is not a node of the job, like a login node with salloc's shell.
    job = ["salloc", "-N2", "--ntasks-per-node=1", f"mpirun.{flavour}", *TUTTI, "world", "--json"]
    check(cluster.run([*job, str(tmp_path / "w.json")], env=AS_ROOT, timeout=90))
    rows = rows_in(tmp_path / "w.json")
    assert [(row["host"], row["launcher"]) for row in rows] == [("n1", flavour), ("n2", flavour)]


def test_a_bench_under_srun_prints_one_table_and_scancel_keeps_the_measurements(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Ctrl-C at srun would kill the ranks. MPI is left out, because it aborts the ranks."""
    result = tmp_path / "b.json"
    flags = ["--backends", "gloo,mpi", "--sizes", "1K:1M:x2", "--json", str(result)]
    bench = cluster.popen(["srun", "-N2", "-n2", *TUTTI, "bench", "collectives", *flags])
    assert bench.stdout and bench.stderr
    head = []
    while not (head and head[-1].lstrip()[:1].isdigit()):  # a first row
        head.append(bench.stdout.readline())
        assert head[-1], "the bench ended before it was stopped"
    assert sum("# all_reduce, 2 ranks" in line for line in head) == 1
    note = next(line for line in bench.stderr if line.startswith("note: Ctrl-C at srun"))
    cluster.run(note[note.index("scancel") :].split())  # scancel --signal=INT JOB.STEP
    out, _ = bench.communicate(timeout=30)
    assert bench.returncode == 130 and "# stopped: " in out, out
    content = json.loads(result.read_text())
    assert content["rows"] and not content["complete"]
    (left_out,) = content["skipped"]
    if importlib.util.find_spec("mpi4py") is not None:
        assert "srun --mpi=pmix" in left_out["reason"]


def test_profile_under_srun_captures_all_tasks_and_explains_once(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, torch.distributed as dist, tutti\n"
        "with tutti.init(backend='gloo') as world:\n"
        "    weight = torch.zeros(1000, requires_grad=True)\n"
        "    optimizer = torch.optim.SGD([weight])\n"
        "    for step in range(8):\n"
        "        weight.grad = torch.ones(1000)\n"
        "        dist.all_reduce(weight.grad)\n"
        "        optimizer.step()\n"
        "time.sleep(world.rank)\n"  # the first explains, and waits for the other's end
    )
    words = ["profile", "--wait", "1", "--warmup", "1", "--active", "2", "--json", "p.json", "--"]
    srun = ["srun", "-N2", "-n2", *TUTTI, *words, str(script)]
    done = cluster.run(srun, cwd=tmp_path, timeout=60)
    check(done)
    assert done.stdout.count("2 steps of 2 ranks, gloo") == 1, done.stdout
    assert done.stderr.count("traces are in") == 1 and "no word of task" not in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("profile-slurm-")
    assert [path.name for path in folder.iterdir()] == ["traces"]
    assert len(json.loads((tmp_path / "p.json").read_text())["ranks"]) == 2
