"""Given an install without compiled parts, when shm is first used, then they are compiled once into
the user's cache; where that fails, gloo is used and one line says why."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.comm.shm import jit_build

SOURCE = Path(jit_build.__file__).parents[3]

# Quick: compiled without optimisation, and every call is counted.
COMPILER = """#!/bin/sh
echo called >> {calls}
exec {compiler} "$@" -O0
"""

USE_BOTH = """
import torch, torch.distributed as dist
from tutti.comm.shm import native_group, register
register()
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
"""
USE_CORE = "from tutti.comm.shm.native import core; assert core().tutti_abi() > 0"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return an environment with an empty cache, in which tutti has no compiled parts."""
    package = tmp_path / "package" / "tutti"
    shutil.copytree(SOURCE / "tutti", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    changed = {"PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return {**os.environ, **changed}


def start(code: str, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", code]  # shows the threads of an abort
    return subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_two_processes_that_start_at_once_compile_once(env: dict[str, str], tmp_path: Path) -> None:
    calls, compiler = tmp_path / "calls", tmp_path / "counting-cc"
    compiler.write_text(COMPILER.format(calls=calls, compiler="cc"))
    compiler.chmod(0o755)
    processes = [start(USE_CORE, env | {"CC": str(compiler)}) for _ in range(2)]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert calls.read_text() == "called\n"
    assert "".join(errors).count("compiling") == 1
    cache = tmp_path / "cache" / "tutti" / "shm"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert len(list(cache.glob("*.so"))) == 1
    # A third process finds it, also without a compiler.
    third = start(USE_CORE, env | {"CC": "/bin/false"})
    assert third.communicate(timeout=60) == ("", "") and third.returncode == 0


@pytest.mark.timeout(200)
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_front_that_first_use_compiles_serves_torch(
    env: dict[str, str], tmp_path: Path
) -> None:
    for name, compiler in (("CC", "cc"), ("CXX", "c++")):
        script = tmp_path / name
        script.write_text(COMPILER.format(calls=tmp_path / "calls", compiler=compiler))
        script.chmod(0o755)
        env[name] = str(script)
    process = start(USE_BOTH.replace("dist.destroy", "assert native_group()\ndist.destroy"), env)
    _, error = process.communicate(timeout=190)
    assert process.returncode == 0, error
    assert (tmp_path / "calls").read_text() == "called\n" * 2
    assert error.count("compiling") == 1


@pytest.mark.parametrize(
    ("compiler", "reason"), [("/bin/false", "false could not compile"), ("/none", "compiler")]
)
def test_a_broken_or_missing_compiler_gives_gloo_and_one_line(
    compiler: str, reason: str, env: dict[str, str]
) -> None:
    process = start(USE_BOTH, env | {"CC": compiler, "CXX": compiler})
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    (line,) = [line for line in error.splitlines() if "gloo" in line]
    assert line.startswith("tutti: gloo is used instead of shm") and reason in line


def test_a_cache_that_others_can_write_to_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "tutti" / "shm"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    process = start(USE_CORE, env)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "777" in error and "XDG_CACHE_HOME" in error and not list(cache.glob("*.so"))


def test_a_library_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_build, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = jit_build.core_library()
    stale = tmp_path / f"_core{jit_build.EXTENSION_SUFFIXES[0]}"
    for mark, usable in (("tutti-built-from:other;", False), (library.hash, False)):
        stale.write_text(f"ELF {mark}")
        assert (jit_build._find(library) == stale) is usable
    stale.write_text(f"ELF tutti-built-from:{library.hash};")
    assert jit_build._find(library) == stale
