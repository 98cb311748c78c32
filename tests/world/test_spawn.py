"""tutti.spawn: a Python function as ranks, from a script, a REPL, a notebook and a thread."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty

import pytest

import tutti

SCRIPT = """
import os
import threading
import tutti

def numbers(first, second):  # in __main__, without a guard: ranks cannot import this function
    print("output of rank", os.environ["RANK"])
    return first + second + int(os.environ["RANK"])

def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("broken batch 7")
    threading.Event().wait()

print("results", tutti.spawn(numbers, (10, 20), ranks=3))
print("silent", tutti.spawn(numbers, (1, 2), ranks=2, show="none"))
try:
    tutti.spawn(fails_on_rank_1)
except tutti.RankFailed as error:
    print("failed:", error)
"""


def test_a_script_gets_the_result_of_every_rank_and_the_first_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "results [30, 31, 32]" in run.stdout
    assert "silent [3, 4]" in run.stdout
    assert {f"[rank {rank}] output of rank {rank}" for rank in range(3)} <= set(
        run.stdout.splitlines()
    )
    assert run.stdout.count("output of rank 0") == 1  # not of the call with show="none"
    failed = run.stdout.partition("failed:")[2]
    assert "rank 1" in failed and "ValueError: broken batch 7" in failed
    assert f'File "{script}", line 12, in fails_on_rank_1' in failed


def test_what_cannot_be_sent_or_returned_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(tutti.UsageError, match="lock"):
        tutti.spawn(lambda: lock)
    with pytest.raises(tutti.UsageError, match=r"result of rank \d.*lock"):
        tutti.spawn(threading.Lock)
    with pytest.raises(tutti.UsageError, match="--ranks must be at least 1"):
        tutti.spawn(print, ranks=0)
    raised: list[BaseException] = []

    def in_a_thread() -> None:
        try:
            tutti.spawn(print)
        except tutti.UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, threading, tutti\n"
        "def wait():\n"
        "    print(os.getpid(), flush=True)\n"
        "    threading.Event().wait()\n"
        "try:\n"
        "    tutti.spawn(wait)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    program = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    ranks = [int(program.stdout.readline().split()[-1]) for _ in range(2)]
    program.send_signal(signal.SIGINT)
    output, _ = program.communicate(timeout=30)
    assert "interrupted" in output
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


def test_a_notebook_and_its_next_cell(tmp_path: Path) -> None:
    from jupyter_client.manager import start_new_kernel

    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    manager, client = start_new_kernel(kernel_name="python3", env=environment)

    def run_cell(code: str) -> str:
        text, request = "", client.execute(code)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                message = client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            text += content.get("text", "") + content.get("data", {}).get("text/plain", "")
            text += "\n".join(content.get("traceback", []))
            if content.get("execution_state") == "idle":
                return text
        raise TimeoutError(text)

    try:
        run_cell("import os, tutti\nfactor = 3")
        run_cell("def rank():\n    print('in a rank')\n    return factor * int(os.environ['RANK'])")
        shown = run_cell("tutti.spawn(rank, ranks=2)")
        assert "[0, 3]" in shown and "[rank 1] in a rank" in shown
        run_cell("factor = 5")
        assert "[0, 5]" in run_cell("tutti.spawn(rank, ranks=2, show='first')")
        assert "ZeroDivisionError" in run_cell("tutti.spawn(lambda: 1 // 0, ranks=1)")
        short = f"pixels=8, steps=3, evaluate=False, device='cpu', out={str(tmp_path / 'run')!r}"
        trained = run_cell(f"tutti.train('lenet', ranks=2, {short})['steps']")
        assert "step 3/3: loss" in trained and trained.rstrip().endswith("3")
        assert "still here" in run_cell("print('still here')")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
