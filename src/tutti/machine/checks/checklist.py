"""All checks, in the order of reading, and the examination that runs them."""

from tutti.machine.checks import (
    active,
    agreement,
    clocks,
    environment,
    gpus,
    limits,
    memory,
    network,
    nvlink,
    pcie,
    rdma,
    versions,
)
from tutti.machine.checks.check import Check
from tutti.machine.checks.finding import ORDER, Finding
from tutti.machine.checks.patient import Patient

CHECKS: tuple[Check, ...] = (
    *environment.CHECKS,
    *versions.CHECKS,
    *limits.CHECKS,
    *memory.CHECKS,
    *gpus.CHECKS,
    *nvlink.CHECKS,
    *pcie.CHECKS,
    *clocks.CHECKS,
    *network.CHECKS,
    *rdma.CHECKS,
    *agreement.CHECKS,
    *active.CHECKS,
)


def examine(patient: Patient, checks: tuple[Check, ...] = CHECKS) -> list[Finding]:
    """Run every check; what hurts most comes first, and then the order of the checks."""
    found = [finding for check in checks for finding in check.findings(patient)]
    return sorted(found, key=lambda finding: ORDER.index(finding.status))


def markdown_table() -> str:
    """The table of docs/doctor.md, made from the checks so that the two never disagree."""
    rows = ["| id | looks at | why | cure |", "| --- | --- | --- | --- |"]
    rows += [f"| `{c.id}` | {c.about} | {c.why} | {c.cure} |" for c in CHECKS]
    return "\n".join(rows)
