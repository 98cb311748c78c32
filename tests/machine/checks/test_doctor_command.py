"""The command: its report, its files, its exit codes, and what it says of a live world."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import RECORDED, plain, with_variables

from hosts import Host, _ip, hosts_missing, network
from tutti.cli import run
from tutti.machine.checks.checklist import CHECKS
from tutti.machine.recording import write_machines
from worlds import TUTTI, clean_environment, run_command

KEYS = {"id", "scope", "status", "observed", "expected", "cure"}


@pytest.mark.parametrize(
    ("machine", "code"), [("h100-nvswitch", 0), ("vm-hidden-pcie", 0), ("degraded-nvlink", 1)]
)
def test_failures_end_with_one_and_warnings_with_zero(
    machine: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--from", str(RECORDED / f"{machine}.json")]) == code


def test_findings_come_first_and_fit_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--from", str(RECORDED / "roce-cluster.json"), "--all", "--fix"])
    report, _, commands = capsys.readouterr().out.partition("\n\n")
    lines = report.splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split()[0] for line in lines[1:] if re.match(r"(FAIL|WARN|pass|skip) ", line)]
    assert words == sorted(words, key=("FAIL", "WARN", "pass", "skip").index)
    assert {"FAIL", "WARN", "pass", "skip"} == set(words)
    assert re.match(r"\d+ checks: 1 failed \(rdma.rate\), 2 warnings \(.*rdma.errors\)", lines[-3])
    assert "ibstat mlx5_2" in commands


def test_what_passed_is_counted_and_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--from", str(RECORDED / "cpu-only.json")])
    out = capsys.readouterr().out
    assert re.match(r"\d+ checks: \d+ passed, \d+ skipped \(no GPU: \d+;", out)
    assert len(out.splitlines()) <= 4


def test_json_has_every_check_with_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    run(["doctor", "--from", str(RECORDED / "roce-cluster.json"), "--json", str(file)])
    told = json.loads(file.read_text())
    assert told["schema"] == "tutti.doctor/1" and told["environment"] and told["command"]
    assert {check["id"] for check in told["checks"]} == {check.id for check in CHECKS}
    assert all(set(check) >= KEYS for check in told["checks"])
    assert told["hosts"] == ["roce-1", "roce-2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "/nowhere.json"], "No such file"),
        (["--from", "{json}"], "schema"),
        (["--from", "{good}", "--active"], "--active"),
        (["--from", "{good}", "--record", "x.json"], "--record"),
        (["--json", "/proc/nowhere/x.json"], "--json"),
    ],
)
def test_wrong_usage_is_one_line_and_two(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("{}")
    given = {"{json}": str(tmp_path / "x.json"), "{good}": str(RECORDED / "cpu-only.json")}
    assert run(["doctor", *(given.get(each, each) for each in arguments)]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1


def test_help_and_recorded_machines_need_no_torch() -> None:
    program = """
import sys
from tutti.cli import run
try:
    run(["doctor", "--help"])
except SystemExit:
    pass
run(["doctor", "--from", sys.argv[1]])
run(["doctor"])
assert "torch" not in sys.modules
"""
    machine = RECORDED / "h100-nvswitch.json"
    done = run_command([sys.executable, "-c", program, machine])
    assert done.returncode == 0, done.stderr
    assert "--from" in done.stdout and "passed" in done.stdout


def test_what_is_recorded_here_is_judged_alike_from_the_file(tmp_path: Path) -> None:
    """Also the test that the doctor works on this very machine, whatever it is."""
    file, live, again = tmp_path / "here.json", tmp_path / "live.json", tmp_path / "again.json"
    code = run(["doctor", "--record", str(file), "--json", str(live)])
    assert code in (0, 1)
    assert run(["doctor", "--from", str(file), "--json", str(again)]) == code
    one, other = (json.loads(each.read_text())["checks"] for each in (live, again))
    tried = ("active.", "network.calls", "clocks.skew")
    judged = [
        [check for check in checks if not check["id"].startswith(tried)] for checks in (one, other)
    ]
    assert judged[0] == judged[1]
    assert not any("the check itself failed" in check["observed"] for check in one)


@pytest.mark.measured
def test_ranks_of_a_world_are_tried_and_the_one_that_differs_is_named(tmp_path: Path) -> None:
    """One world for all of it: two local ranks, of which the second has a variable of its own."""
    file = tmp_path / "doctor.json"
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['NCCL_IB_SL'] = '1'\n"
        "from tutti.cli import run\n"
        f"sys.exit(run(['doctor', '--device', 'cpu', '--json', {str(file)!r}]))\n"
    )
    done = run_command([*TUTTI, "run", "-n", "2", "--device", "cpu", program], timeout=90)
    checks = json.loads(file.read_text())["checks"]
    by_id = {check["id"]: check for check in checks}
    assert by_id["agreement.variables"]["status"] == "warn", done.stderr
    assert by_id["agreement.variables"]["scope"] == "rank:1"
    assert by_id["active.collective"]["status"] == "pass"
    for check in ("active.compute", "active.memory", "active.links"):
        assert by_id[check]["status"] != "skip", by_id[check]
    assert "two GPUs" in by_id["active.p2p"]["observed"]


needs_hosts = pytest.mark.skipif(hosts_missing() is not None, reason=str(hosts_missing()))
needs_tc = pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc (iproute2)")


def _doctor(hosts: tuple[Host, ...], file: Path, *flags: str) -> list[dict[str, str]]:
    """A rank on each host, started by hand as somebody without a launcher would."""
    world = clean_environment() | {
        "PYTHONPATH": str(Path(__file__).parent.parent.parent / "src"),
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
    said = [process.communicate(timeout=80) for process in ranks]
    assert all(process.returncode in (0, 1) for process in ranks), said
    checks: list[dict[str, str]] = json.loads(file.read_text())["checks"]
    return [check for check in checks if check["status"] in ("warn", "fail")]


@needs_hosts
@needs_tc
@pytest.mark.measured
def test_the_link_that_is_limited_is_named_and_no_other(tmp_path: Path) -> None:
    """Three hosts; between n1 and n2 lies a link of their own, held to 200 Mbit/s."""
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
        links = _doctor(made.hosts, tmp_path / "slow.json")
        named = {(each["id"], each["scope"], each["status"]) for each in links}
        assert ("active.links", "link:0-1", "fail") in named, links
        assert {each[1] for each in named if each[0] == "active.links"} == {"link:0-1"}

        # And a host that swallows what another sends it: the call that fails is named.
        made.hosts[2].run(["ip", "route", "add", "blackhole", f"{n2.address}/32"])
        calls = _doctor(made.hosts, tmp_path / "cut.json", "--no-active")
        cut = {each["scope"] for each in calls if each["id"] == "network.calls"}
        assert cut == {"link:2-1", "link:1-2"}


def test_a_machine_can_be_recorded_by_hand_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machine.json"
    write_machines(file, [with_variables(plain(), NCCL_IB_DISABLE="yes")], [], "by hand")
    assert run(["doctor", "--from", str(file), "--fix"]) == 1
    out = capsys.readouterr().out
    assert "NCCL_IB_DISABLE=yes is read as 0" in out
    assert os.environ.get("NCCL_IB_DISABLE") is None  # a fix is printed, never run
