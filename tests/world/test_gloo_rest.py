"""A process does not end while gloo's threads still hold what is Python's."""

import json
import sys

from worlds import run_command

# Nobody takes Python's lock from this thread, so a thread of gloo that has finished an operation
# just as its tensor was dropped here cannot let go of it. That is tried until it has happened.
PROGRAM = """
import sys, time, weakref
import torch, torch.distributed as dist
from tutti.world.liveness import wait_for_gloo_threads
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)

def held_after_an_operation():
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor, async_op=True)
    return weakref.ref(tensor)

end = time.monotonic() + 60
while (held := held_after_an_operation())() is None and time.monotonic() < end:
    pass
before = held() is not None
wait_for_gloo_threads()
print([before, held() is not None])
"""


def test_gloos_threads_have_let_go_when_they_rest() -> None:
    done = run_command([sys.executable, "-c", PROGRAM])

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.lower()) == [True, False]


def test_where_gloo_was_not_used_nothing_is_waited_for() -> None:
    program = (
        "import time; time.sleep = exit\n"
        "from tutti.world.liveness import wait_for_gloo_threads\n"
        "wait_for_gloo_threads()\n"
        "print('on')"
    )

    assert run_command([sys.executable, "-c", program]).stdout == "on\n"
