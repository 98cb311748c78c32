"""The compiled parts; everything else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

core = Path("src/tutti/comm/shm/core")

setup(
    ext_modules=[
        # Plain C without Python or torch in it, loaded with ctypes. Where no compiler is found the
        # package installs without it, and says so when the shm backend is asked for.
        Extension(
            "tutti.comm.shm._core",
            sources=sorted(str(source) for source in core.glob("*.c")),
            depends=sorted(str(header) for header in core.glob("*.h")),
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-fvisibility=hidden",
                "-ffp-contract=off",  # one rounding per operation: the same bits on every machine
                "-Wall",
                "-Wextra",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        ),
    ],
)
