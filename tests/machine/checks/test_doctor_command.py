"""tutti doctor: report, files, exit codes, and live worlds on one and on several hosts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from check_cases import PLAIN, RECORDED, with_variables

from hosts import Host, _ip, hosts_missing, network
from tutti.cli import run_cli
from tutti.machine.checks.checklist import CHECKS
from tutti.machine.recording import format_machines
from worlds import TUTTI, clean_environment, run_command

KEYS = {"id", "scope", "status", "observed", "expected", "cure"}


def doctor(name: str, *flags: str) -> int:
    return run_cli(["doctor", "--from", str(RECORDED / f"{name}.json"), *flags])


@pytest.mark.parametrize(
    ("machine", "code"), [("h100-nvswitch", 0), ("vm-hidden-pcie", 0), ("degraded-nvlink", 1)]
)
def test_failures_exit_with_1_and_warnings_with_0(machine: str, code: int) -> None:
    assert doctor(machine) == code


def test_findings_are_sorted_and_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    doctor("roce-cluster", "--all", "--fix")
    report, _, commands = capsys.readouterr().out.partition("\n\n")
    lines = report.splitlines()
    assert max(map(len, lines)) <= 80
    statuses = [line.split()[0] for line in lines if re.match(r"(FAIL|WARN|pass|skip) ", line)]
    assert statuses == sorted(statuses, key=("FAIL", "WARN", "pass", "skip").index)
    assert {"FAIL", "WARN", "pass", "skip"} == set(statuses)
    assert f"{len(CHECKS)} checks: 1 failed (rdma.rate), 2 warnings (" in report
    assert "ibstat mlx5_2" in commands


def test_passed_checks_are_counted_and_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    doctor("cpu-only")
    out = capsys.readouterr().out
    assert re.match(r"\d+ checks: \d+ passed, \d+ skipped \(\d+ × no GPU; ", out)
    assert len(out.splitlines()) <= 4


def test_json_has_every_check_with_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    doctor("roce-cluster", "--json", str(file))
    results = json.loads(file.read_text())
    assert results["schema"] == "tutti.doctor/1" and results["environment"] and results["command"]
    assert {check["id"] for check in results["checks"]} == {check.id for check in CHECKS}
    assert all(set(check) >= KEYS for check in results["checks"])
    assert results["hosts"] == ["roce-1", "roce-2"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--from", "/nowhere.json"], "does not exist"),
        (["--from", "{json}"], "schema"),
        (["--from", "{good}", "--active"], "--active"),
        (["--from", "{good}", "--no-active"], "--active"),
        (["--from", "{good}", "--record", "x.json"], "--record"),
        (["--from", "{good}", "--device", "cpu"], "--device"),
        (["--json", "/proc/nowhere/x.json"], "--json"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("{}")
    files = {"{json}": str(tmp_path / "x.json"), "{good}": str(RECORDED / "cpu-only.json")}
    assert run_cli(["doctor", *(files.get(each, each) for each in arguments)]) == 2
    err = capsys.readouterr().err
    assert named in err and len(err.strip().splitlines()) == 1


def test_help_and_checks_without_ranks_do_not_import_torch() -> None:
    program = """
import sys
from tutti.cli import run_cli
try:
    run_cli(["doctor", "--help"])
except SystemExit:
    pass
run_cli(["doctor", "--from", sys.argv[1]])
run_cli(["doctor"])
assert "torch" not in sys.modules
"""
    machine = RECORDED / "h100-nvswitch.json"
    done = run_command([sys.executable, "-c", program, machine])
    assert done.returncode == 0, done.stderr
    assert "--from" in done.stdout and "passed" in done.stdout


def test_a_recorded_file_gives_the_findings_of_the_live_machine(tmp_path: Path) -> None:
    """Also tests that the doctor works on the machine that runs the tests."""
    file, live, again = tmp_path / "here.json", tmp_path / "live.json", tmp_path / "again.json"
    code = run_cli(["doctor", "--record", str(file), "--json", str(live)])
    assert code in (0, 1)
    assert run_cli(["doctor", "--from", str(file), "--json", str(again)]) == code
    one, other = (json.loads(each.read_text())["checks"] for each in (live, again))
    probes = ("active.", "nccl.", "network.calls", "clocks.skew")
    without_probes = [
        [check for check in checks if not check["id"].startswith(probes)] for checks in (one, other)
    ]
    assert without_probes[0] == without_probes[1]
    assert not any("the check itself failed" in check["observed"] for check in one)


def test_a_fix_is_printed_and_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.json"
    machine = with_variables(PLAIN, NCCL_IB_DISABLE="yes", NCCL_P2P_DISABLE="1")
    file.write_text(format_machines([machine], [], "written by hand"))
    assert run_cli(["doctor", "--from", str(file)]) == 1
    assert "--fix" in capsys.readouterr().out
    assert run_cli(["doctor", "--from", str(file), "--fix"]) == 1
    out = capsys.readouterr().out
    assert "NCCL_IB_DISABLE=yes is read as 0" in out and "\nunset NCCL_P2P_DISABLE" in out
    assert os.environ.get("NCCL_IB_DISABLE") is None


# --- live worlds ---------------------------------------------------------------------------------


@pytest.mark.measured
def test_local_ranks_are_probed_and_a_rank_that_differs_is_reported(tmp_path: Path) -> None:
    """Two local ranks; only the second has NCCL_IB_SL."""
    file = tmp_path / "doctor.json"
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['NCCL_IB_SL'] = '1'\n"
        "from tutti.cli import run_cli\n"
        f"sys.exit(run_cli(['doctor', '--device', 'cpu', '--json', {str(file)!r}]))\n"
    )
    done = run_command([*TUTTI, "run", "-n", "2", "--device", "cpu", program], timeout=90)
    results = json.loads(file.read_text())
    by_id = {check["id"]: check for check in results["checks"]}
    assert by_id["agreement.variables"]["status"] == "warn", done.stderr
    assert by_id["agreement.variables"]["scope"] == "rank:1"
    assert by_id["active.collective"]["status"] == "pass"
    for check in ("active.compute", "active.memory", "active.links"):
        assert by_id[check]["status"] != "skip", by_id[check]
    assert "two GPUs" in by_id["active.p2p"]["observed"]
    assert by_id["nccl.start"]["status"] == "skip" and results["nccl"] is None
    assert "--device cpu" in by_id["nccl.start"]["observed"]


needs_hosts = pytest.mark.skipif(hosts_missing() is not None, reason=str(hosts_missing()))
needs_tc = pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc (iproute2)")


def problems_between(hosts: tuple[Host, ...], file: Path, *flags: str) -> list[dict[str, str]]:
    """Start one rank on each host without a launcher, and return warnings and failures."""
    world = clean_environment() | {
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[0].name,
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
    }
    ranks: list[subprocess.Popen[str]] = []
    for rank, host in enumerate(hosts):
        command = [*TUTTI, "doctor", "--device", "cpu", *flags]
        command += ["--json", str(file)] if rank == 0 else []
        ranks.append(host.popen(command, env=world | {"RANK": str(rank)}))
    outputs = [process.communicate(timeout=80) for process in ranks]
    assert all(process.returncode in (0, 1) for process in ranks), outputs
    checks: list[dict[str, str]] = json.loads(file.read_text())["checks"]
    return [check for check in checks if check["status"] in ("warn", "fail")]


@needs_hosts
@needs_tc
@pytest.mark.measured
def test_only_the_limited_link_and_the_blocked_connection_are_reported(tmp_path: Path) -> None:
    """Three hosts; n1 and n2 have a separate link, limited to 200 Mbit/s."""
    with network(3) as made:
        n1, n2, _ = made.hosts
        pid = n2._init.pid
        own = [f"link add own type veth peer name own netns {pid}", "link set own up"]
        _ip(n1, [*own, f"route add {n2.address}/32 dev own"])
        _ip(n2, ["link set own up", f"route add {n1.address}/32 dev own"])
        for host in (n1, n2):
            shape = "tc qdisc add dev own root tbf rate 200mbit burst 64kb latency 50ms"
            done = host.run(shape.split())
            if done.returncode != 0:
                pytest.skip(f"this kernel has no tbf: {done.stderr.strip()}")
        found = problems_between(made.hosts, tmp_path / "slow.json")
        summaries = {(each["id"], each["scope"], each["status"]) for each in found}
        assert ("active.links", "link:0-1", "fail") in summaries, found
        assert {each[1] for each in summaries if each[0] == "active.links"} == {"link:0-1"}

        # A host that drops all packets to another: the failed connections are reported.
        made.hosts[2].run(["ip", "route", "add", "blackhole", f"{n2.address}/32"])
        found = problems_between(made.hosts, tmp_path / "blocked.json", "--no-active")
        blocked = {each["scope"] for each in found if each["id"] == "network.calls"}
        assert blocked == {"link:2-1", "link:1-2"}
