"""What ranks print: prefixed with the rank, or rank 0's alone; kept in a log file per rank."""

import os
import sys
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO

from tutti.world.errors import UsageError

_TAIL_LINES = 40


class Stream:
    """One pipe from a rank: passes whole lines on, so that ranks do not cut each other's."""

    def __init__(self, prefix: str, shown_on: IO[str] | None, log: IO[bytes] | None) -> None:
        self.fd, self.child = os.pipe2(os.O_CLOEXEC)
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._prefix = prefix
        self._shown_on = shown_on
        self._log = log
        self._rest = b""

    def read(self) -> bool:
        """Read what there is and pass it on; False at the end of the stream."""
        data = os.read(self.fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            self._pass_on(line)
        return bool(data)

    def _pass_on(self, line: bytes) -> None:
        if self._log is not None:
            self._log.write(line + b"\n")
            self._log.flush()
        text = line.decode(errors="replace")
        self.tail.append(text)
        if self._shown_on is not None:
            try:
                print(f"{self._prefix}{text}", file=self._shown_on, flush=True)
            except BrokenPipeError:  # the reader (`| head`) has seen enough; the run goes on
                self._shown_on = None

    def close(self) -> None:
        os.close(self.fd)


class RankOutput:
    """Where the output of all ranks goes."""

    def __init__(self, ranks: int, show: str, log_dir: Path | None) -> None:
        self._show = show
        self._ranks = ranks
        self._logs: list[IO[bytes]] = []
        self._open: list[Stream] = []
        self._errors: dict[int, Stream] = {}
        self._log_dir = log_dir
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
                for rank in range(ranks):
                    self._logs.append((log_dir / f"rank{rank}.log").open("wb"))
            except OSError as error:
                raise UsageError(f"--log-dir {log_dir}: {error.strerror}: choose another") from None

    def shows(self, rank: int) -> bool:
        """Whether what this rank prints goes to the terminal."""
        return self._show == "all" or (self._show == "first" and rank == 0)

    def targets(self, rank: int) -> tuple[int | None, int | None]:
        """What to give a rank as standard output and error; None lets it have ours directly."""
        log = self._logs[rank] if self._logs else None
        if log is None and self.shows(rank) and (self._show == "first" or self._ranks == 1):
            return None, None  # a terminal stays a terminal, for progress bars and colours
        prefix = f"[rank {rank}] " if self._show == "all" and self._ranks > 1 else ""
        shown = self.shows(rank)
        out = Stream(prefix, sys.stdout if shown else None, log)
        err = Stream(prefix, sys.stderr if shown else None, log)
        self._open += [out, err]
        self._errors[rank] = err
        return out.child, err.child

    def streams(self) -> list[Stream]:
        """The streams that have not ended yet."""
        return self._open

    def started(self) -> None:
        """Every rank has its own copy of the writing ends: let go of ours."""
        for stream in self._open:
            os.close(stream.child)

    def end(self, stream: Stream) -> None:
        """A stream has come to its end."""
        self._open.remove(stream)
        stream.close()

    def tail(self, rank: int) -> str:
        """The last lines a rank wrote to standard error."""
        return "\n".join(self._errors[rank].tail) if rank in self._errors else ""

    def __enter__(self) -> "RankOutput":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for stream in self._open:
            stream.close()
        for log in self._logs:
            log.close()
