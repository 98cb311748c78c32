"""Finding the compiled front, and saying why the plain one serves where it cannot be used."""

import functools
import importlib.util
import mmap
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

from tutti.comm.shm import native
from tutti.comm.shm.registration import make

_BUILD = "pip install --no-build-isolation -e ."
_MARK = b"tutti-front-built-for-torch:"


@functools.cache
def compiled_front() -> tuple[ModuleType | None, str]:
    """The compiled front and what it is, or None and why not."""
    folder = Path(__file__).parent
    files = [folder / f"_front{suffix}" for suffix in EXTENSION_SUFFIXES]
    file = next((each for each in files if each.exists()), None)
    if file is None:
        return None, f"plain front: the compiled one was not built: {_BUILD}"
    ours, theirs = _built_for(file), torch.__version__.split("+")[0]
    if ours != theirs:
        # Loading it would call into classes that have another shape now.
        return None, f"plain front: the compiled one is for torch {ours}, not {theirs}: {_BUILD}"
    try:
        spec = importlib.util.spec_from_file_location("tutti.comm.shm._front", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.load_core(str(native.core_path()))
    except (ImportError, RuntimeError) as error:
        return None, f"plain front: the compiled one does not load ({error}): {_BUILD}"
    module.set_exceptions(native.error_for)
    module.set_maker(make)
    return module, f"compiled front for torch {ours}"


def _built_for(file: Path) -> str:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
        start = text.find(_MARK)
        if start < 0:
            return "an unknown version"
        start += len(_MARK)
        return text[start : text.find(b";", start)].decode()
