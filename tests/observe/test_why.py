"""tutti why names the rank, the operation and the line of faults planted into real processes."""

import pytest
from hanging_programs import ANYWHERE, LOADER, PLAIN, PROGRAMS
from planted_hangs import Case, explain_all

# Every fault in the plain program on gloo, those that depend on the backend also on shm, and each
# fault of every program once in one of the other programs. benchmarks/planted_hangs.py runs all.
# Accelerate accepts only the backends that it knows.
OF_BACKEND = [*PLAIN, "exits_early", "is_killed", "is_stopped", "extra_barrier", "slow_but_alive"]
CASES = {
    "gloo": [Case("plain", "gloo", fault) for fault in [*ANYWHERE, *PLAIN, *LOADER]],
    "shm": [Case("plain", "shm", fault) for fault in OF_BACKEND],
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
