"""64-bit words in the memory of GPUs: signals, counters and barriers, launched from the host."""

import ctypes
import os

import torch

from tutti.comm.symmetric import cuda_kernels
from tutti.comm.symmetric.errors import PeerDied, Timeout
from tutti.world.errors import UsageError

_REMEMBERED = 256  # waits whose description is kept for a timeout


class Words:
    """What the kernels do, on the current stream, and the errors of those that waited in vain."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._ignored = torch.zeros(1, dtype=torch.int64, device=device)
        # The host's own memory, so that it can look without waiting for the GPU.
        self._failed = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._failed_word = ctypes.c_int64.from_address(self._failed.data_ptr())
        self._waits: dict[int, str] = {}
        self._tickets = 0
        self._broken: str | None = None
        self.pids: list[int | None] = []  # of the ranks on this host

    def compile(self) -> None:
        """Compile and run each kernel once, in scratch memory, while nobody waits for this rank."""
        table, count, arrival = 0, 8, 16
        scratch = torch.zeros(3, dtype=torch.int64, device=self._device)
        word = scratch.data_ptr()
        scratch[0] = word
        self.meet(word + table, 0, 1, arrival, count, 10.0, "itself")
        self.wait(word + arrival, 1, 10.0, "itself")
        self.store(word, 1)
        self.add(word, 1)
        self.compare_swap(word, 2, 3)

    def load(self, address: int, /) -> int:
        """The value now (acquire); waits for the stream."""
        return self.fetch_add(address, 0)

    def store(self, address: int, value: int, /) -> None:
        """Set the word (release)."""
        self._launch(cuda_kernels.set_word, address, _signed(value))

    def add(self, address: int, value: int, /) -> None:
        """Add to the word (release)."""
        answer = self._ignored.data_ptr()
        self._launch(cuda_kernels.add_to_word, address, _signed(value), answer)

    def fetch_add(self, address: int, value: int, /) -> int:
        """Add; returns what was there before, and waits for the stream."""
        before = torch.empty_like(self._ignored)
        self._launch(cuda_kernels.add_to_word, address, _signed(value), before.data_ptr())
        return self._answer(before)

    def compare_swap(self, address: int, expected: int, desired: int, /) -> int:
        """Store `desired` if `expected` is there; returns what was there before."""
        before = torch.empty_like(self._ignored)
        numbers = (_signed(expected), _signed(desired))
        self._launch(cuda_kernels.swap_word, address, *numbers, before.data_ptr())
        return self._answer(before)

    def wait(self, address: int, at_least: int, timeout: float, what: str) -> None:
        """Let the stream wait until the word is `at_least` so much (acquire)."""
        self._launch(
            cuda_kernels.wait_for_word,
            address,
            _signed(at_least),
            int(timeout * 1e9),
            self._failed.data_ptr(),
            self._ticket(f"{timeout:g} s for {what}"),
        )

    def meet(
        self,
        table: int,
        rank: int,
        size: int,
        arrivals: int,
        count: int,
        timeout: float,
        what: str,
    ) -> None:
        """Let the streams of all ranks wait for each other; see the kernel."""
        limit, failed = int(timeout * 1e9), self._failed.data_ptr()
        ticket = self._ticket(f"{timeout:g} s for all ranks in {what}")
        places = (table, rank, size, arrivals, count)
        self._launch(cuda_kernels.meet, *places, limit, failed, ticket)

    @property
    def in_step(self) -> bool:
        """Whether all barriers so far took place, as far as is known."""
        return self._broken is None and self._failed_word.value == 0

    def check(self) -> None:
        """Raise what a wait on the GPU could not."""
        if self._broken is not None:
            raise UsageError(
                f"this heap is out of step since an earlier error ({self._broken}): close it and "
                "make another"
            )
        ticket = self._failed_word.value
        if ticket == 0:
            return
        self._failed_word.value = 0
        what = self._waits.get(ticket, "a signal or a barrier")
        for rank, pid in enumerate(self.pids):
            if pid is not None and not _runs(pid):
                self._broken = f"rank {rank} died"
                raise PeerDied(rank, what)
        if "all ranks" in what:
            self._broken = f"rank {self._rank} waited {what}"
        raise Timeout(f"rank {self._rank} waited {what}")

    def _answer(self, word: torch.Tensor) -> int:
        value = int(word.item())
        self.check()
        return value % (1 << 64)

    def _ticket(self, what: str) -> int:
        self._tickets += 1
        self._waits[self._tickets] = what
        self._waits.pop(self._tickets - _REMEMBERED, None)
        return self._tickets

    def _launch(self, kernel: object, *arguments: int) -> None:
        with torch.cuda.device(self._device):
            kernel[(1,)](*arguments, num_warps=cuda_kernels.WARPS)  # type: ignore[index]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, but there
        pass
    return True


def _signed(value: int) -> int:
    """The signed number with the same 64 bits: the GPU's words are signed."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value
