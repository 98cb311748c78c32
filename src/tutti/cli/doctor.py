"""tutti doctor: health and configuration checks, each with its cure."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from tutti.cli.flags import parse
from tutti.cli.results import check_writable, write_json
from tutti.machine.checks.checklist import examine
from tutti.machine.checks.patient import Patient, Probes
from tutti.machine.checks.table import fixes, report
from tutti.machine.recording import read_machines, write_machines
from tutti.measure.terminal import text_width
from tutti.world.errors import START_TIMEOUT, UsageError
from tutti.world.launch import LocalWorld
from tutti.world.launchers import identify

if TYPE_CHECKING:
    from tutti.machine.checks.finding import Finding


@dataclass(frozen=True)
class Doctor:
    """Check this machine, or all hosts of a world: tutti doctor, or torchrun … -m tutti doctor

    Tells what was observed, what is expected and the cure. Exit code 1 if a check failed; warnings
    alone are 0. It changes nothing.
    """

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Start this many local ranks, unless a launcher already did."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where active tests compute."""
    ranks_per_gpu: int = 1
    """How many ranks may share one GPU."""
    active: bool = False
    """Also measure: compute, memory, links between ranks, copies between GPUs, a collective.
    Takes some seconds. The default is to do so if there is more than one rank."""
    fix: bool = False
    """Print the commands that would cure what was found. They are never run."""
    all: bool = False
    """Show what passed and what was skipped, too."""
    record: Path | None = None
    """Write what was observed, one machine per host, to this file."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Judge the machines that were recorded in this file, and not this one."""
    json: Path | None = None
    """Write the findings to this file, too."""
    start_timeout: float = START_TIMEOUT
    """Seconds for all ranks to arrive."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(Doctor, "tutti doctor", arguments)
    check_writable("--json", options.json)
    check_writable("--record", options.record)
    if options.from_ is not None:
        return _conclude(_recorded(options), options)
    identity = identify(os.environ)
    if options.ranks is not None and identity.size == 1 and identity.launcher == "python":
        return LocalWorld(
            command=[sys.executable, "-m", "tutti", "doctor", *arguments],
            ranks=options.ranks,
            device=options.device,
            ranks_per_gpu=options.ranks_per_gpu,
            show="first",
            start_timeout=options.start_timeout,
            reported_codes=(1, 2),  # a check that failed is no rank that did
        ).run()
    return _visit(options, arguments, identity.size)


def _visit(options: Doctor, arguments: Sequence[str], size: int) -> int:
    from tutti.machine.checks.visit import visit_machine, visit_world

    if size == 1:
        return _conclude(visit_machine(options.device, options.active), options)
    active = options.active or not _names(arguments, "active")
    patient, is_first = visit_world(options.device, active, options.start_timeout)
    if is_first:
        return _conclude(patient, options)
    return _code(examine(patient))  # all ranks end alike


def _recorded(options: Doctor) -> Patient:
    for flag in ("active", "record", "ranks"):
        if getattr(options, flag):
            raise UsageError(f"--from judges a recorded machine: leave --{flag} out")
    assert options.from_ is not None
    try:
        machines = tuple(read_machines(options.from_))
    except OSError as error:
        raise UsageError(f"--from {options.from_}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--from {options.from_}: {error}") from None
    live = ("calls", "offsets", "compute", "bandwidth", "links", "copies", "results")
    reasons = dict.fromkeys(live, "a recorded machine cannot be tried")
    return Patient(machines, (), Probes(reasons=reasons))


def _names(arguments: Sequence[str], flag: str) -> bool:
    """Whether a switch was given either way."""
    return any(each.partition("=")[0] in (f"--{flag}", f"--no-{flag}") for each in arguments)


def _conclude(patient: Patient, options: Doctor) -> int:
    findings = examine(patient)
    for line in report(findings, options.all, text_width(sys.stdout)):
        print(line)
    if options.fix:
        lines = list(fixes(findings))
        print("\n".join(["", *(lines or ["# nothing to cure"])]))
    if options.record is not None:
        note = "observed by tutti doctor, one machine per host"
        try:
            write_machines(options.record, patient.machines, ["tutti", *sys.argv[1:]], note)
        except OSError as error:
            raise UsageError(f"--record {options.record}: {error.strerror}") from None
    if options.json is not None:
        results = {
            "checks": [finding.to_json() for finding in findings],
            "hosts": [machine.host for machine in patient.machines],
            "ranks": len(patient.seats),
            "from": None if options.from_ is None else str(options.from_),
        }
        write_json(options.json, "tutti.doctor/1", results)
    return _code(findings)


def _code(findings: "Sequence[Finding]") -> int:
    return int(any(finding.status == "fail" for finding in findings))
