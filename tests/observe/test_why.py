"""tutti why names the rank, the operation and the line of faults planted into real processes."""

import pytest
from hanging_programs import ANYWHERE, LOADER, PLAIN, PROGRAMS
from planted_hangs import Case, explain_all

FAULTS = [*ANYWHERE, *PLAIN, *LOADER]
# Every fault in the plain program on both backends, and once in one of the other programs.
# Accelerate accepts only the backends that it knows.
CASES = {
    backend: [Case("plain", backend, fault) for fault in FAULTS] for backend in ("gloo", "shm")
}
CASES["other programs"] = [
    Case(program, "gloo" if program == "accelerate" else ("gloo", "shm")[number % 2], fault)
    for number, fault in enumerate([*ANYWHERE, *LOADER])
    for program in [PROGRAMS[1 + number % 5]]
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_planted_faults_are_named(cases: list[Case]) -> None:
    wrong = explain_all(cases)
    for case, faults in wrong.items():
        print(case, *faults, sep="\n    ")
    # The target is 95 % of all faults.
    assert len(wrong) <= 0.05 * len(cases), f"{len(wrong)} of {len(cases)} are wrong"
