"""Who waits how long: limits are kept, and a callback may wait for whatever else is under way."""

import numpy as np
import pytest
from shm_ranks import Group, results

from tutti.comm.shm import native


def impatient(g: Group) -> None:
    """Rank 1 comes only after rank 0 has given up a wait."""
    for _ in range(5):
        x, word = np.ones(1000), np.zeros(1)
        if g.rank == 1:
            g.run(native.RECV, [], [word], peer=0, timeout=20)
        work = g.submit(native.ALL_REDUCE, [x], [x], timeout=5, dtype=native.F64)
        if g.rank == 0:
            with pytest.raises(native.ShmTimeout, match=r"all_reduce .* is not done yet"):
                work.wait(0.05)
            g.run(native.SEND, [word], peer=1)
        work.wait()
        assert (x == 2).all()


def test_given_a_late_peer_when_a_wait_has_a_limit_then_it_ends_in_time() -> None:
    results(impatient, 2)
