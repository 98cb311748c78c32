"""The compiled half of the structures under sanitizers, with threads as ranks."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "src/tutti/comm/shm/core"
SOURCES = [CORE / f"structures_{name}.c" for name in ("map", "rows")]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_race_no_bad_access_no_torn_value_no_lost_addition(
    sanitizer: str, tmp_path: Path
) -> None:
    program = tmp_path / "stress"
    # -Wno-tsan: ThreadSanitizer does not model fences; test_structures_model.py checks them.
    flags = ["-std=gnu11", "-g", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-tsan", "-pthread"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{CORE}"]
    build = ["gcc", *flags, HERE / "structures_stress.c", *SOURCES, "-o", program]
    built = subprocess.run(build, capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, "20000"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "no addition lost" in done.stdout
