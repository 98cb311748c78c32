"""The core's ledger: another program can read the operations that a rank has called."""

import os
import struct
from pathlib import Path

import numpy as np

from shm_ranks import Group, call, results
from tutti.comm.shm import native
from tutti.comm.shm.native import core


def read_by_another(g: Group) -> list[tuple[str, int, int, int, str]]:
    """Rank 0 reads rank 1's ledger through /proc, as a program outside the group would."""
    call(g, native.ALL_REDUCE, 16, -1, where="train.py:5 in step")
    core().tutti_note_location(b"train.py:9 in step")
    pid = np.array([os.getpid()])
    pids = [np.empty_like(pid) for _ in range(g.size)]
    g.run(native.ALL_GATHER, [pid], pids)
    g.barrier()
    actual = []
    if g.rank == 0:
        for link in Path(f"/proc/{pids[1][0]}/fd").iterdir():
            if not os.readlink(link).startswith("/memfd:tutti-shm:default"):
                continue
            data = link.read_bytes()
            magic, abi, entries, rank, _size = struct.unpack_from("<8sIIii", data, 0)
            if rank != 1:
                continue
            ledger, entry_bytes, location = struct.unpack_from("<QQQ", data, 48)
            assert (magic, abi, entries) == (b"TUTTISHM", native.ABI, 64)
            assert data[80:208].rstrip(b"\0") == b"default"
            for at in range(ledger, ledger + 2 * entry_bytes, entry_bytes):
                _id, sequence, kind, dtype = struct.unpack_from("<QQII", data, at)
                (state,) = struct.unpack_from("<I", data, at + 36)
                text = data[at + 96 : at + 192].split(b"\0")[0].decode()
                actual.append((sequence, kind, dtype, state, text))
            actual.append(data[location + 16 : location + 272].split(b"\0")[0].decode())
    g.barrier()
    return actual


def test_given_a_running_rank_then_its_ledger_can_be_read_from_outside() -> None:
    assert results(read_by_another, 2)[0] == [
        (1, native.ALL_REDUCE, native.F32, 2, "train.py:5 in step"),
        (2, native.ALL_GATHER, native.BYTES, 2, ""),
        "train.py:9 in step",
    ]
