"""Builds the compiled libraries; everything else about the package is in pyproject.toml.

A library that cannot be built here (no compiler, or an isolated build without torch) is compiled at
first use by src/tutti/comm/shm/jit_build.py, which also has the sources and flags.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup

_spec = importlib.util.spec_from_file_location("jit_build", "src/tutti/comm/shm/jit_build.py")
jit_build = importlib.util.module_from_spec(_spec)
sys.modules["jit_build"] = jit_build  # the dataclasses in it look up their module
_spec.loader.exec_module(jit_build)


def extension(library) -> Extension:
    def relative(paths) -> list[str]:
        return [os.path.relpath(path) for path in paths]

    return Extension(
        f"tutti.comm.shm.{library.name}",
        sources=relative(library.sources),
        depends=relative(library.headers),
        define_macros=[("TUTTI_SOURCE_HASH", f'"{library.hash}"')],
        extra_compile_args=[*library.flags, *(f"-isystem{path}" for path in library.include_paths)],
        library_dirs=[str(path) for path in library.library_paths],
        extra_link_args=list(library.link),
        language="c++" if Path(library.sources[0]).suffix == ".cpp" else "c",
        # A failure is a warning here. The first use tries again and prints the compiler's error.
        optional=True,
    )


def extensions() -> list[Extension]:
    built = [extension(jit_build.core_library())]
    try:
        built.append(extension(jit_build.front_library()))
        built.append(extension(jit_build.recorder_library()))
    except ImportError:
        print(
            "this build cannot import torch, so the shm front and the recorder are compiled at "
            "first use"
        )
    return built


setup(ext_modules=extensions())
