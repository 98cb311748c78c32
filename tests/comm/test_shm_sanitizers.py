"""The core under ThreadSanitizer and AddressSanitizer: random operations, every result checked."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "src" / "tutti" / "comm" / "shm" / "core"
STRESS = Path(__file__).with_name("shm_core_stress.c")


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("sanitizer", "cores"),
    [
        ("thread", "of this machine"),
        ("address,undefined", "of this machine"),
        ("address", "distant"),
    ],
)
def test_given_random_operations_then_the_sanitizer_finds_nothing(
    sanitizer: str, cores: str, tmp_path: Path
) -> None:
    # Low thresholds: small tensors take the paths of large ones, so that all paths are tested.
    options = ["-g", "-O1", "-std=gnu11", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    options += ["-DONE_SHOT_BYTES=1024", "-DDIRECT_BYTES=64", "-DPLAIN_VECTORS", "-Wno-tsan"]
    if cores == "distant":  # bytes for peers are always written with non-temporal stores
        options.append("-DSLOW_NS_PER_LINE=0")
    sources = [*sorted(CORE.glob("*.c")), STRESS]

    def build(source: Path) -> str:
        made = str(tmp_path / f"{source.stem}.o")
        subprocess.run(["gcc", *options, f"-I{CORE}", "-c", source, "-o", made], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        objects = list(compilers.map(build, sources))
    program = tmp_path / "stress"
    linked = subprocess.run(
        ["gcc", f"-fsanitize={sanitizer}", *objects, "-o", program, "-pthread"],
        capture_output=True,
        text=True,
    )
    if "cannot find" in linked.stderr:
        pytest.skip(f"gcc here has no runtime for {sanitizer}: {linked.stderr}")
    assert linked.returncode == 0, linked.stderr
    for ranks in (2, 3):
        ran = subprocess.run(
            [str(program), str(ranks), "2", str(ranks)], capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr[:20000]
        assert "all right" in ran.stdout
