"""How often `tutti why` is right: faults planted into real programs, none of which knows tutti.

    python benchmarks/planted_hangs.py --out benchmarks/planted_hangs_MACHINE_DATE.json

Runs every fault of tests/observe/hanging_programs.py in every program and on every backend that
runs on a CPU. An explanation is right if its class, its rank and its source line are those of the
planted fault. The seconds until the answer are recorded, too.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("", "observe")]

from hanging_programs import ANYWHERE, LOADER, PLAIN, PROGRAMS  # noqa: E402
from planted_hangs import Case, explain_all  # noqa: E402

from tutti.machine.environment import describe_environment  # noqa: E402

_AT_ONCE = 30  # jobs; waiting ranks need no CPU


def all_cases() -> list[Case]:
    cases = []
    for program in PROGRAMS:
        # Accelerate accepts only the backends that it knows.
        backends = ("gloo",) if program == "accelerate" else ("gloo", "shm")
        faults = [*ANYWHERE, *LOADER] + ([*PLAIN] if program == "plain" else [])
        cases += [Case(program, backend, fault) for backend in backends for fault in faults]
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cases = all_cases()
    wrong: dict[Case, list[str]] = {}
    seconds: list[float] = []
    began = time.monotonic()
    for start in range(0, len(cases), _AT_ONCE):
        wrong |= explain_all(cases[start : start + _AT_ONCE], seconds)
        print(
            f"{min(start + _AT_ONCE, len(cases))} of {len(cases)}, {len(wrong)} wrong", flush=True
        )
    seconds.sort()
    result = {
        "schema": "tutti.benchmarks.planted_hangs/1",
        "command": ["python", *sys.argv],
        "environment": describe_environment(),
        "cases": len(cases),
        "right": len(cases) - len(wrong),
        "seconds_to_answer": {"p50": seconds[len(seconds) // 2], "max": seconds[-1]},
        "by_program": {
            program: f"{sum(c not in wrong for c in own)} of {len(own)}"
            for program in PROGRAMS
            for own in [[case for case in cases if case.program == program]]
        },
        "wrong": [
            {"program": c.program, "backend": c.backend, "fault": c.fault, "found": faults}
            for c, faults in wrong.items()
        ],
        "seconds": time.monotonic() - began,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['right']} of {len(cases)} right, {result['by_program']}")


if __name__ == "__main__":
    main()
