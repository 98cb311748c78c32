"""Compiles the C core and the C++ front of the shm backend, at installation or at first use.

setup.py compiles the libraries at installation. Each library contains a hash of its sources,
compiler flags and platform. The hash of the front also includes the versions of torch and Python
and the C++ ABI of torch. If the installed library is missing or has another hash (for example after
an update of torch), the library is loaded from the cache folder $XDG_CACHE_HOME/tutti/shm (default
~/.cache/tutti/shm), and compiled into this folder if necessary. setup.py imports this file by its
path, so only the standard library is imported at the top of this file.
"""

import fcntl
import hashlib
import importlib.util
import mmap
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

FOLDER = Path(__file__).resolve().parent
_MARK = b"tutti-built-from:"


class BuildFailed(RuntimeError):
    """A library is missing and cannot be built here. The message states the reason and a fix."""


@dataclass(frozen=True)
class Library:
    """One compiled library: its sources and how it is built."""

    name: str
    sources: tuple[Path, ...]  # the files that are passed to the compiler
    headers: tuple[Path, ...]
    compilers: tuple[str, ...]  # an environment variable, then programs to try
    flags: tuple[str, ...]
    link: tuple[str, ...]
    built_for: str  # versions and platform; part of the hash and of the cached file's name
    include_paths: tuple[Path, ...] = ()
    library_paths: tuple[Path, ...] = ()

    @property
    def hash(self) -> str:
        digest = hashlib.sha256(repr((self.flags, self.link, self.built_for)).encode())
        for file in sorted((*self.sources, *self.headers)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()[:20]


@cache
def core_library() -> Library:
    """Return the C core."""
    folder = FOLDER / "core"
    return Library(
        "_core",
        tuple(sorted(folder.glob("*.c"))),
        tuple(sorted(folder.glob("*.h"))),
        ("CC", "cc", "gcc", "clang"),
        # -ffp-contract=off disables fused multiply-add, so that all machines give equal results.
        (
            "-O3",
            "-g0",
            "-std=gnu11",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-Wall",
            "-Wextra",
        ),
        ("-pthread",),
        f"{sys.platform}-{platform.machine()}",
    )


@cache
def front_library() -> Library:
    """Return the C++ front, for the installed torch. Raise ImportError if there is no torch."""
    folder = FOLDER / "front"
    headers = (*sorted(folder.glob("*.h")), FOLDER / "core/tutti_shm.h")
    return _torch_library("_front", folder / "module.cpp", headers)


@cache
def recorder_library() -> Library:
    """Return the recorder of tutti.observe. Raise ImportError if torch is not installed."""
    return _torch_library("_recorder", FOLDER.parents[1] / "observe/recorder.cpp", ())


def _torch_library(name: str, source: Path, headers: tuple[Path, ...]) -> Library:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ImportError("torch is not installed")
    import torch

    torch_folder = Path(found.origin).parent
    torch_include = torch_folder / "include"
    python_include = Path(sysconfig.get_paths()["include"])
    cxx11_abi = int(torch.compiled_with_cxx11_abi())
    return Library(
        name,
        (source,),
        headers,
        ("CXX", "c++", "g++", "clang++"),
        (
            "-O2",
            "-g0",
            "-std=c++20",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            f"-D_GLIBCXX_USE_CXX11_ABI={cxx11_abi}",
        ),
        # torch has loaded these libraries before this library is loaded, so no rpath is needed.
        # libstdc++ is named explicitly, because some compilers would link it statically, and two
        # copies of libstdc++ in one process crash.
        ("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-l:libstdc++.so.6"),
        f"torch{torch.__version__}-abi{cxx11_abi}-{sysconfig.get_config_var('SOABI')}"
        f"-{sys.platform}-{platform.machine()}",
        (torch_include, torch_include / "torch/csrc/api/include", python_include),
        (torch_folder / "lib",),
    )


def build_if_missing(*libraries: Library) -> list[Path]:
    """Return the files of these libraries. Compile them if necessary, or raise BuildFailed.

    Several processes may call this function at once: one process compiles, and the others wait.
    """
    if None in map(_find, libraries):
        folder = _cache_folder()
        began = time.time()
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = [library for library in libraries if _find(library) is None]
            for library in missing:
                log = folder / f"{_file_name(library)}.log"
                if log.exists() and log.stat().st_mtime >= began:
                    # Another process failed to compile the library while this process waited for
                    # the lock. Compiling again would fail too.
                    raise BuildFailed(_failure(library, log))
            if missing:
                _compile_all(missing, folder)
    return [path for library in libraries if (path := _find(library)) is not None]


def _compile_all(libraries: list[Library], folder: Path) -> None:
    commands = [_command(library) for library in libraries]  # raises if there is no compiler
    for scratch in folder.glob("tmp*"):  # left by processes that were killed while compiling
        shutil.rmtree(scratch, ignore_errors=True)
    torch = sys.modules.get("torch")
    version = f" for torch {torch.__version__}" if torch else ""
    message = f"compiling C and C++ code{version} into {folder} (once, takes about a minute)"
    print(f"tutti: {message}", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(len(libraries)) as pool:
        list(pool.map(_compile, libraries, commands, [folder] * len(libraries)))


def _find(library: Library) -> Path | None:
    """Return the file of a library built from the current sources, or None if there is none.

    The file may be in the folder of this module or in the cache folder.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = FOLDER / f"{library.name}{suffix}"
        if path.exists():
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
                if m.find(_MARK + library.hash.encode() + b";") >= 0:
                    return path
    path = _cache_path() / f"{_file_name(library)}.so"
    return path if _is_private(path) and _is_private(path.parent) else None


def _file_name(library: Library) -> str:
    return f"{library.name}-{re.sub(r'[^A-Za-z0-9.+-]', '_', library.built_for)}-{library.hash}"


def _cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "tutti" / "shm"


def _is_private(path: Path) -> bool:
    """Return whether a file or folder exists and only this user could have written to it."""
    try:
        mode, owner = path.lstat().st_mode, path.lstat().st_uid
    except OSError:
        return False
    is_plain = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    return is_plain and owner == os.geteuid() and not mode & 0o022


def _cache_folder() -> Path:
    """Create and return the cache folder. Refuse a folder that another user can write to."""
    path = _cache_path()
    cure = "set XDG_CACHE_HOME to a folder that only you can write to"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if not os.access(path, os.W_OK):
            raise PermissionError("read-only")
    except OSError as error:
        raise BuildFailed(f"the cache folder {path} cannot be used ({error}): {cure}") from None
    if not _is_private(path):
        raise BuildFailed(
            f"the cache folder {path} belongs to user {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):o}, so other users could replace libraries: {cure}"
        )
    return path


def _command(library: Library) -> list[str]:
    """Return the command line of the compiler, without the output file."""
    variable, *programs = library.compilers
    value = os.environ.get(variable)
    compiler = shlex.split(value) if value else [p for p in programs if shutil.which(p)][:1]
    if not compiler or shutil.which(compiler[0]) is None:
        language = "C++" if variable == "CXX" else "C"
        raise BuildFailed(
            f"no {language} compiler was found (tried {value or ', '.join(programs)}). Install gcc "
            f"and g++ (apt install g++, dnf install gcc-c++), or set {variable} to a compiler."
        )
    flags = [*library.flags, f'-DTUTTI_SOURCE_HASH="{library.hash}"']
    flags += [f"-isystem{path}" for path in library.include_paths]
    link = [*(f"-L{path}" for path in library.library_paths), *library.link]
    return [*compiler, *flags, "-fPIC", "-shared", *map(str, library.sources), *link]


def _compile(library: Library, command: list[str], folder: Path) -> None:
    path = folder / f"{_file_name(library)}.so"
    log = path.with_name(f"{_file_name(library)}.log")
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled = Path(scratch) / path.name
        try:
            arguments = [*command, "-o", str(compiled)]
            done = subprocess.run(
                arguments, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, errors="replace"
            )
            output, code = done.stdout, done.returncode
        except OSError as error:
            output, code = str(error), 127
        if code == 0 and compiled.exists():
            compiled.chmod(0o700)
            os.replace(compiled, path)
            return
    log.write_text(f"{shlex.join(command)}\n{output}\nexit status {code}\n")
    raise BuildFailed(_failure(library, log))


def _failure(library: Library, log: Path) -> str:
    """Return a message with the compiler's first error, the log file and a fix."""
    command, *lines = log.read_text().splitlines()
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
    needs_headers = "Python.h" in first
    cure = ". Install the Python headers (apt install python3-dev)." if needs_headers else ""
    compiler = shlex.split(command)[0]
    return f"{compiler} could not compile {library.name}: {first.strip()} (log: {log}){cure}"
