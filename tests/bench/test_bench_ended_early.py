"""tutti bench that is ended before its time: what it leaves, and that it leaves at once."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worlds import TUTTI, clean_environment

# A rank that is importing torch when Ctrl-C comes; rank 0's import swallows it, as torch's may.
_SWALLOWS = """
import os, sys, time
from pathlib import Path

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "RANK" in os.environ:
            sys.meta_path.remove(self)
            Path(__file__).with_name(f"importing{os.environ['RANK']}").touch()
            try:
                time.sleep(20)
            except KeyboardInterrupt:
                if os.environ["RANK"] != "0":
                    raise

sys.meta_path.insert(0, Slow())
"""


@contextmanager
def started(*words: str | Path, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """A bench in a session of its own; nothing of it is left when the block is."""
    process = subprocess.Popen(
        [str(word) for word in [*TUTTI, "bench", *words]],
        env=clean_environment() | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()  # its ranks go with it
        process.communicate()


def wait_for(files: list[Path], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def test_ctrl_c_ends_ranks_that_are_still_starting_though_an_import_swallows_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SWALLOWS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with started("collectives", "-n", "2", "--device", "cpu", PYTHONPATH=path) as process:
        wait_for([tmp_path / "importing0", tmp_path / "importing1"], process)
        os.killpg(process.pid, signal.SIGINT)
        # Rank 0 would wait for rank 1 at the roll call, until the 30 s of grace are over.
        _, err = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "stopped by SIGINT: all 2 ranks have ended" in err
