"""The compiled parts; everything else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

core = Path("src/tutti/comm/shm/core")
front = Path("src/tutti/comm/shm/front")


def for_installed_torch() -> list[Extension]:
    """The compiled shm front, where the build sees torch (pip install --no-build-isolation)."""
    try:
        import torch
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError:
        return []  # the front in Python serves instead
    version = torch.__version__.split("+")[0]
    return [
        Extension(
            "tutti.comm.shm._front",
            sources=[str(front / "front.cpp")],
            depends=sorted(str(header) for header in (*front.glob("*.h"), *core.glob("*.h"))),
            define_macros=[
                ("TUTTI_TORCH_VERSION", f'"{version}"'),
                ("_GLIBCXX_USE_CXX11_ABI", str(int(torch.compiled_with_cxx11_abi()))),
            ],
            library_dirs=library_paths(),
            libraries=["c10", "torch", "torch_cpu", "torch_python"],
            extra_compile_args=[
                *("-O2", "-std=c++20", "-fvisibility=hidden", "-g0", "-Wall", "-Wextra"),
                *(f"-isystem{folder}" for folder in include_paths()),
            ],
            language="c++",
            optional=True,
        )
    ]


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
                "-g0",
                "-std=gnu11",
                "-fvisibility=hidden",
                "-ffp-contract=off",  # one rounding per operation: the same bits on every machine
                "-Wall",
                "-Wextra",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        *for_installed_torch(),
    ],
)
