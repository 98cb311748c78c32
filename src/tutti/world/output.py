"""What ranks print: prefixed with the rank, or rank 0's alone; kept in a log file per rank."""

import os
import re
import sys
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, TextIO

from tutti.world.errors import UsageError

_TAIL_LINES = 40
_LONGEST_LINE = 1 << 20


class Stream:
    """One pipe from a rank: passes whole lines on, so that ranks do not cut each other's."""

    def __init__(self, prefix: str, shown_on: TextIO | None, log: IO[bytes] | None) -> None:
        self.fd, self.child = os.pipe2(os.O_CLOEXEC)
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._prefix = prefix.encode()
        self._shown_on = shown_on
        self._log = log
        self._rest = b""

    def read(self) -> bool:
        """Read what there is and pass it on; False at the end of the stream."""
        data = os.read(self.fd, 1 << 16)
        # A progress bar ends its lines with \r: each is passed on as it comes.
        *lines, self._rest = re.split(rb"(?<=[\n\r])", self._rest + data)
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines, self._rest = [*lines, self._rest + b"\n"], b""
        for line in lines:
            self._pass_on(line)
        return bool(data)

    def _pass_on(self, line: bytes) -> None:
        self.tail.append(line)
        try:
            if self._log is not None:
                self._log.write(line)
                self._log.flush()
        except OSError as error:
            print(f"tutti run: a log file fails: {error.strerror}", file=sys.stderr)
            self._log = None
        if self._shown_on is None:
            return
        try:
            # As bytes: a rank may print what our own terminal's encoding cannot.
            self._shown_on.buffer.write(self._prefix + line)
            self._shown_on.flush()
        except (
            OSError
        ):  # the reader (`| head`) has seen enough, or the disk is full: the run goes on
            self._shown_on = None

    def close(self) -> None:
        """Let go of the pipe."""
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
        lines = self._errors[rank].tail if rank in self._errors else ()
        return b"".join(lines).decode(errors="replace")

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
