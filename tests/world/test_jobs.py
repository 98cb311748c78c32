"""Cluster jobs: readable scripts, and no injection of shell commands."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tutti.world.errors import UsageError
from tutti.world.jobs import mpi_script, parse_hosts, slurm_script
from worlds import TUTTI, run_command, run_tutti

HOSTILE = ['x"; touch pwned; "', "$(touch pwned)", "`touch pwned`", "a\n#SBATCH --x", "a, b", "'"]


def test_a_slurm_script_is_readable() -> None:
    submit = ["submit", "slurm", "--nodes", 2, "--gpus-per-node", 8, "--cpus-per-rank", 12]
    limits = ["--partition", "gpu", "--time", "2:00:00", "--sbatch", "exclusive", "mail-type=END"]
    done = run_command(
        [*TUTTI, *submit, *limits, "--dry-run", "--", "python", "train.py", "--lr=1"]
    )
    assert done.returncode == 0
    assert done.stdout == (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=8\n"
        "#SBATCH --cpus-per-task=12\n"
        "#SBATCH --job-name=train\n"
        "#SBATCH --gpus-per-node=8\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --time=2:00:00\n"
        "#SBATCH --output=%x-%j.out\n"
        "#SBATCH --exclusive\n"
        "#SBATCH --mail-type=END\n"
        "set -euo pipefail\n"
        "\n"
        "# 16 ranks. tutti reads rank, node and master from srun's variables.\n"
        "# If a rank fails, srun ends all ranks. Otherwise they would wait for the failed rank.\n"
        "srun --kill-on-bad-exit=1 --cpus-per-task=12 python train.py --lr=1\n"
    )


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_never_reaches_an_sbatch_line(value: str) -> None:
    with pytest.raises(UsageError, match="may contain only letters"):
        slurm_script(["true"], 1, 1, None, {"job-name": value})


@pytest.mark.parametrize("name", [*HOSTILE, "exclusive\ntouch /tmp/pwned #", "", "-x"])
def test_a_hostile_name_never_becomes_an_sbatch_line(name: str) -> None:
    with pytest.raises(UsageError, match="--sbatch must be a flag"):
        slurm_script(["true"], 1, 1, None, {name: ""})


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_argument_is_quoted(value: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:])", value]
    # srun replaced by a shell function that runs its command: only the quoting is tested.
    body = slurm_script(command, 1, 1, None, {}).replace("srun --kill-on-bad-exit=1", "env --")
    done = run_command(["bash", "-c", body], cwd=tmp_path)
    assert done.stdout == f"{[value]}\n"
    assert list(tmp_path.iterdir()) == []


def test_hosts_are_read_with_their_ranks() -> None:
    assert parse_hosts("n1:4, n2") == [("n1", 4), ("n2", 1)]
    for wrong in ("n1:0", "n1;id", "", "n1:x"):
        with pytest.raises(UsageError, match="--hosts must be a list such as n1:4,n2:4"):
            parse_hosts(wrong)


def test_several_hosts_get_the_address_of_rank_0() -> None:
    hosts = [("n1", 4), ("n2", 4)]
    openmpi, mpich, again = (
        mpi_script(["prog"], hosts, ["mpirun"], flavour)
        for flavour in ("openmpi", "mpich", "mpich")
    )
    assert "mpirun -np 8 --host n1:4,n2:4 --bind-to none -x MASTER_ADDR=n1 prog" in openmpi
    assert "mpirun -np 8 -hosts n1:4,n2:4 -genv MASTER_ADDR n1 -genv MASTER_PORT 2" in mpich
    assert mpich == again  # the same port each time


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich"])
def test_tutti_submit_mpi_runs_a_world(mpirun: str, tmp_path: Path) -> None:
    if shutil.which(mpirun) is None:
        pytest.skip(f"{mpirun} is not installed")
    as_root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    submit = ["submit", "mpi", "--mpirun", mpirun, "--hosts", "localhost:2"]
    world = [*TUTTI, "world", "--json", tmp_path / "w.json"]
    done = run_command([*TUTTI, *submit, "--", *world], env=as_root, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "w.json").read_text())["rows"]
    assert [row["local_rank"] for row in rows] == [0, 1]


def test_an_existing_other_script_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "true.mpi.sh").write_text("precious\n")
    submit = ["submit", "mpi", "--mpirun", "true", "--flavour", "mpich", "--", "true"]
    done = run_tutti(*submit, cwd=tmp_path)
    assert done.returncode == 2 and "true.mpi.sh exists" in done.stderr
    assert (tmp_path / "true.mpi.sh").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm", "--nodes", "2"], "the command is missing. Add it after --"),
        (["slrum", "--", "true"], "got 'slrum'"),
        (["slurm", "--script", "/no/dir/x", "--", "true"], "/no/dir/x"),
        (["slurm", "--nodes", "0", "--dry-run", "--", "true"], "--nodes 0"),
        (["slurm", "--node", "2", "--", "true"], "did you mean --nodes?"),
        (["mpi", "--mpirun", "no-such-mpirun", "--", "true"], "no-such-mpirun is not installed"),
    ],
)
def test_wrong_usage_of_submit_is_one_line_and_exit_code_two(
    arguments: list[str], message: str
) -> None:
    done = run_tutti("submit", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
