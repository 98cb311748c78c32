"""Telemetry of a training run: step timer, status sync, throughput, stragglers, progress.

About once a second, all ranks exchange their status in one small collective. All other code in this
module reads only the result, a `Status`. So between two status syncs, telemetry never makes a rank
wait for its device or for another rank.
"""

import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from tutti import comm
from tutti.measure.units import three_digits
from tutti.models.config import GPTConfig
from tutti.world.world import World

_SYNC_SECONDS = 1.0
_MAX_SYNC_STEPS = 1000
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# One Ctrl-C may reach a rank twice: from the terminal, and from a launcher such as torchrun that
# forwards it. A SIGINT within this time after the first one counts as the same Ctrl-C.
_SAME_SIGNAL_SECONDS = 1.0

# Maximum number of steps that are measured between two status syncs, because measuring takes time.
MAX_MEASURED = 20
_autograd_engine: Any = torch.autograd.Variable._execution_engine


class StepTimer:
    """Measures each rank's own time in a step: the seconds without waiting for other ranks.

    Replicas wait for each other once per step, when gradients are summed. A rank's own time begins
    when it has the summed gradients of one step, and ends with its backward pass in the next step.
    In this interval (update, input, forward, backward), no other rank delays this rank. All other
    ranks wait for the rank with the longest own time:

        wait of rank r = max(own times of all ranks) − own time of rank r

    This also holds for DDP, which starts its collectives during the backward pass but waits for
    them only after it. If ranks wait for each other inside forward or backward (sharded parameters,
    tp, pp, synchronised batch norms), the interval would include waiting, so the own time is
    unknown.

    The same steps are measured on all ranks. The timer implements the StepClock protocol, whose
    methods are called by engines. Recording a time does not wait for the device. On CUDA, a time is
    an event in the stream of the step, so the interval includes time in which the GPU waits for the
    host to launch kernels.
    """

    def __init__(self, device: torch.device, *, own_time: bool, forward_time: bool = False) -> None:
        """Measure own times if `own_time`, and the times of forward passes if `forward_time`.

        Own times are valid only if ranks wait for each other after backward and nowhere else.
        --split measured needs forward times.
        """
        self._device, self._measures_own_time, self._measures_forward = (
            device,
            own_time,
            forward_time,
        )
        self._stride = 1
        self._step = 0  # number of steps since the last status sync
        self._began: float | torch.cuda.Event | None = None
        self._backward_ended: float | torch.cuda.Event | None = None
        self._measured: list[tuple[int, Any, Any]] = []
        self._forwards: list[tuple[Any, Any]] = []

    def begin(self, steps: int) -> None:
        """Start measuring. The next status sync follows after `steps` steps."""
        self._stride = -(-steps // MAX_MEASURED)
        self._step = 0
        self._began = self._mark() if self._measures_own_time else None

    @contextmanager
    def forward(self) -> Iterator[None]:
        if not self._measures_forward:
            yield
            return
        began = self._mark()
        yield
        self._forwards.append((began, self._mark()))

    def before_last_backward(self, loss: Tensor) -> None:
        """Record the end of the next backward pass, which is the last one of the step."""
        if self._began is not None:
            # The first node of the backward pass queues this callback. So it runs before DDP's
            # callback, which waits for the other ranks.
            loss.register_hook(lambda _: _autograd_engine.queue_callback(self._end_backward))  # type: ignore[no-untyped-call]

    def gradients_ready(self) -> None:
        """Record that the gradients are summed over ranks. The own time of the next step begins."""
        if self._began is not None:
            self._measured.append((self._step, self._began, self._backward_ended))
        self._step += 1
        self._began = self._backward_ended = None
        if self._measures_own_time and self._step % self._stride == 0:
            self._began = self._mark()

    def take(self) -> list[tuple[int, float]]:
        """Return (number of steps since `begin`, own seconds) for each measured step.

        Unknown seconds are NaN. This method waits for the device, unless the losses of these steps
        have been read before.
        """
        taken, self._measured = self._measured, []
        return [(step, _seconds(began, ended)) for step, began, ended in taken]

    def take_forward_seconds(self) -> float:
        """Return the total seconds of the forward passes since the last call, and wait for them.

        Backward passes are not included, because a backward pass ends only when the gradients of
        the slowest rank have arrived.
        """
        taken, self._forwards = self._forwards, []
        return math.fsum(_seconds(began, ended) for began, ended in taken)

    def _end_backward(self) -> None:
        self._backward_ended = self._mark()

    def _mark(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds(began: Any, ended: Any) -> float:
    if ended is None:
        return math.nan
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()  # returns at once if the losses of these steps have been read
    return float(began.elapsed_time(ended)) / 1e3


@dataclass(frozen=True)
class Status:
    """The state of all ranks at a status sync. Every rank has the same Status."""

    first_step: int
    losses: tuple[float, ...]
    # (step, rank) of the first loss that was not finite.
    nonfinite: tuple[int, int] | None
    stop: bool
    # Samples per second of forward time on each rank, for --split measured. 0 if unknown.
    rates: tuple[float, ...]
    seconds: float
    # (step, own seconds of every rank) of each measured step. StepTimer defines own seconds.
    own_seconds: tuple[tuple[int, tuple[float, ...]], ...] = ()


class StatusSync:
    """Collects losses on the device, and exchanges the status of all ranks about once a second.

    The number of steps between two syncs is computed only from exchanged values, so all ranks sync
    at the same step. If `can_stop`, then Ctrl-C, SIGTERM and SIGUSR1 do not end the process, but
    set `stop` in the next status. A second Ctrl-C ends the process at once.
    """

    def __init__(
        self, rank: int, size: int, first_step: int, timer: StepTimer, can_stop: bool = True
    ) -> None:
        self.rank, self.size, self.timer = rank, size, timer
        self.next_at = first_step + 1
        self._first = first_step
        self._losses: list[Tensor] = []
        self._busy_seconds = 0.0
        self._stop_since: float | None = None
        # Signals that were ignored when this process started (nohup) stay ignored.
        handled = [n for n in _STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        handled = handled if can_stop else []
        self._previous = {n: signal.signal(n, self._on_signal) for n in handled}
        self.restart_clock()

    def add(self, losses: Tensor, busy_seconds: float) -> None:
        """Add this rank's contributions to the mean losses, without waiting for the device."""
        self._losses.append(losses)
        self._busy_seconds += busy_seconds

    def restart_clock(self) -> None:
        """Restart the clock after an evaluation or a checkpoint, to count only training time."""
        self._since = time.perf_counter()
        self.timer.begin(self.next_at - self._first)

    def sync(self, rank_samples: int) -> Status:
        """Exchange the status. In the training loop, only this method waits for the device."""
        losses = torch.cat(self._losses).double().tolist() if self._losses else []
        now = time.perf_counter()
        own_times = self.timer.take()
        steps = len(losses)
        nonfinite = next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None)
        # All values are in one vector, which is summed over all ranks. The vector begins with the
        # values to sum (losses and stop). Then it has one slot per rank. Each rank fills its own
        # slot and leaves the other slots zero, so the sum has the values of every rank.
        common = [loss if math.isfinite(loss) else 0.0 for loss in losses] + [
            float(self._stop_since is not None)
        ]
        slot = [
            0.0 if nonfinite is None else nonfinite + 1.0,
            rank_samples / self._busy_seconds if self._busy_seconds else 0.0,
            now - self._since,
            *(seconds for _, seconds in own_times),
        ]
        slots = [0.0] * (self.size * len(slot))
        slots[self.rank * len(slot) : (self.rank + 1) * len(slot)] = slot
        total = torch.tensor(common + slots, dtype=torch.float64)
        comm.all_reduce(total)
        values = total.tolist()
        # Each of these tuples has one value for each rank.
        nonfinite_steps, rates, seconds, *own_seconds = (
            tuple(values[steps + 1 + i :: len(slot)]) for i in range(len(slot))
        )
        found = [(self._first + int(n) - 1, rank) for rank, n in enumerate(nonfinite_steps) if n]
        measured = [self._first + step for step, _ in own_times]
        status = Status(
            first_step=self._first,
            losses=tuple(values[:steps]),
            nonfinite=min(found, default=None),
            stop=values[steps] > 0,
            rates=rates,
            seconds=max(seconds),
            own_seconds=tuple(zip(measured, own_seconds, strict=True)),
        )
        self._first += steps
        # At most double the interval, because the first steps (compilation, warm-up) are not
        # typical.
        steps_in_interval = int(_SYNC_SECONDS * steps / max(status.seconds, 1e-9))
        self.next_at = self._first + max(1, min(_MAX_SYNC_STEPS, 2 * steps, steps_in_interval))
        self._losses, self._busy_seconds, self._since = [], 0.0, time.perf_counter()
        return status

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self._stop_since is None:
            self._stop_since = now
            if self.rank == 0:  # with os.write, because the signal may interrupt a print
                text = "\ntutti train: stopping after a checkpoint"
                hint = "; press Ctrl-C again to end at once" if number == signal.SIGINT else ""
                os.write(2, f"{text}{hint}\n".encode())
        elif number == signal.SIGINT and now - self._stop_since > _SAME_SIGNAL_SECONDS:
            # Use os._exit, because KeyboardInterrupt would wait for the thread that saves the
            # checkpoint.
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h")  # show the cursor, which the progress bar has hidden
            os._exit(128 + signal.SIGINT)


class Throughput:
    """Computes samples per second, tokens per second and MFU, without the first sync (warm-up).

    MFU is model FLOPs utilisation: achieved FLOP per second / peak FLOP per second of the devices.
    """

    def __init__(self, world: World, precision: str, architecture: Any, seq_len: int) -> None:
        """MFU needs a GPTConfig as `architecture`. `seq_len` is the tokens per sample, or 0."""
        self._world, self._seq_len = world, seq_len
        is_gpt = isinstance(architecture, GPTConfig)
        self._token_flops: int | None = architecture.flops_per_token(seq_len) if is_gpt else None
        self.tokens_per_s: float | None = None  # since the last sync; None if there are no tokens
        self._peak: tuple[float, str] | None = None
        if is_gpt and world.device.type == "cuda":
            from tutti.machine.hardware_catalogue import peak_flops

            tf32 = torch.backends.cuda.matmul.allow_tf32
            self._peak = peak_flops(torch.cuda.get_device_name(world.device), precision, tf32)
        self._samples = 0
        self._seconds = 0.0
        self.samples_per_s: float | None = None

    def add(self, status: Status, samples: int) -> list["Part"]:
        """Add the samples since the last sync. Return the rates for the progress line."""
        rate = samples / status.seconds
        if self.samples_per_s is None:
            self.samples_per_s = rate  # replaced at the second sync, if there is one
        else:
            self._samples += samples
            self._seconds += status.seconds
            self.samples_per_s = self._samples / self._seconds
        step_ms = f"{three_digits(1000 * status.seconds / len(status.losses))} ms/step"
        parts = [(f"{rate:,.0f} samples/s", f"{_short_count(rate)}/s"), (step_ms, step_ms)]
        if self._seq_len:
            self.tokens_per_s = tokens = rate * self._seq_len
            parts.insert(0, (f"{tokens:,.0f} tokens/s", f"{_short_count(tokens)} tok/s"))
        if self._token_flops is not None:
            mfu = self._mfu(rate)
            text = f"MFU {'unknown' if mfu is None else f'{100 * mfu:.1f} %'}"
            parts.append((text, text))
        return parts

    def summary(self) -> dict[str, Any]:
        """Return tokens per second and MFU with its formula, for summary.json."""
        if not self._seq_len or self.samples_per_s is None:
            return {}
        if self._token_flops is None:
            return {"tokens_per_s": self.samples_per_s * self._seq_len}
        flops = f"{self._token_flops:,} FLOP per token (6 N + 12 L d s)"
        return {
            "tokens_per_s": self.samples_per_s * self._seq_len,
            "mfu": self._mfu(self.samples_per_s),
            "mfu_formula": f"tokens/s × {flops} / ({self._world.size} ranks × peak)",
            "mfu_peak": "unknown device" if self._peak is None else self._peak[1],
        }

    def _mfu(self, samples_per_s: float) -> float | None:
        if self._token_flops is None or self._peak is None:
            return None
        # Ranks that share a GPU count as one device.
        devices = self._world.size / self._world.ranks_on_device
        return samples_per_s * self._seq_len * self._token_flops / (devices * self._peak[0])


def _short_count(value: float) -> str:
    """Return a number in at most five characters: 812, 12.3k, 1.2M."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{three_digits(value / factor)}{unit}"
    return three_digits(value)


_WINDOW_STEPS = 20  # number of measured steps behind a straggler warning
_MIN_WAIT_FRACTION = 0.1  # minimum wait of the other ranks for a warning, as a fraction of a step
_MIN_LATE_FRACTION = 0.75  # a straggler must be late in at least this fraction of the window
_QUIET_STEPS = 1000  # minimum number of steps between two warnings


class Stragglers:
    """Computes every rank's waiting time, and warns about ranks for which other ranks wait."""

    def __init__(self, first_step: int) -> None:
        self._first = first_step
        self._window: deque[tuple[int, tuple[float, ...], float]] = deque(maxlen=_WINDOW_STEPS)
        self._quiet_until = 0

    def add(self, status: Status) -> list[float | None]:
        """Return the fraction of a step that each rank spends waiting, or None if it is unknown.

        The first status is ignored, because ranks begin the warm-up at different times.
        """
        ranks = len(status.rates)
        if ranks == 1:
            return [0.0]
        measured = [(n, times) for n, times in status.own_seconds if all(map(math.isfinite, times))]
        if status.first_step == self._first or not measured:
            return [None] * ranks
        seconds = status.seconds / len(status.losses)
        self._window.extend((step, times, seconds) for step, times in measured)
        waits = [fmean(max(times) - times[rank] for _, times in measured) for rank in range(ranks)]
        return [min(1.0, wait / seconds) for wait in waits]

    def warning(self) -> str | None:
        """Return a line that names the late ranks, at most once in `_QUIET_STEPS` steps."""
        if len(self._window) < _WINDOW_STEPS or self._window[-1][0] < self._quiet_until:
            return None
        steps = [times for _, times, _ in self._window]
        means = [fmean(rank_seconds) for rank_seconds in zip(*steps, strict=True)]
        typical, slowest = median_low(means), max(means)
        # Several ranks may be late at the same time, for example all ranks of a slow host.
        late = [rank for rank, mean in enumerate(means) if mean - typical > (slowest - typical) / 2]
        if not late:
            return None
        others = fmean(mean for rank, mean in enumerate(means) if rank not in late)
        delay = fmean(means[rank] for rank in late) - others
        fraction = delay / fmean(seconds for _, _, seconds in self._window)
        late_fraction = fmean(
            min(times[rank] for rank in late) - median_low(times) > delay / 2 for times in steps
        )
        if fraction < _MIN_WAIT_FRACTION or late_fraction < _MIN_LATE_FRACTION:
            return None
        last = self._window[-1][0]
        self._quiet_until = last + _QUIET_STEPS
        names = f"rank {late[0]} is" if len(late) == 1 else f"ranks {', '.join(map(str, late))} are"
        return (
            f"{names} late: the other ranks wait {100 * min(fraction, 1.0):.0f} % of the step "
            f"(last {last - self._window[0][0] + 1} steps)"
        )


_LINE_SECONDS = 5.0
_MAX_BAR, _MIN_BAR = 20, 4  # columns
_ETA_COLUMNS = len("00:00:00")
# In a narrow terminal, the first parts (loss, throughput, memory) are shortened before they are
# omitted. Later parts are omitted without being shortened.
_SHORT_PARTS = 3

Part = tuple[str, str]
"""A part of the progress line: (long text, short text for a narrow terminal)."""


class ProgressReport:
    """Shows step, loss and speed on rank 0: a bar in a terminal, otherwise a line every 5 s."""

    def __init__(self, steps: int, first: int, shown: bool) -> None:
        self._steps = steps
        self._shown = shown
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._next_line = time.monotonic()
        if shown and sys.stderr.isatty():
            self._column = BarColumn(_MAX_BAR)
            self._bar = Progress(
                self._column,
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                console=self._console,
            )
            text = self._fitted([])
            self._task = self._bar.add_task("", total=steps, completed=first, text=text)
            self._bar.start()

    def show(self, step: int, parts: Sequence[Part]) -> None:
        """Show the step and as many parts as fit into the line, the most important parts first."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._fitted(parts))
        elif self._shown and (time.monotonic() >= self._next_line or step == self._steps):
            text = "  ".join(full for full, _ in parts)
            print(f"step {step}/{self._steps}: {text}", file=sys.stderr, flush=True)
            self._next_line = time.monotonic() + _LINE_SECONDS

    def announce(self, text: str, short: str) -> None:
        """Show what the run does next, for example an evaluation."""
        if self._bar is not None:
            self._bar.update(self._task, text=self._fitted([(text, short)]))
        elif self._shown:
            print(text, file=sys.stderr, flush=True)

    def _fitted(self, parts: Sequence[Part]) -> str:
        """Return the text beside the bar, and set the width of the bar to the remaining columns.

        The text must fit, because rich would replace the end of a longer line by an ellipsis.
        """
        count = 2 * len(str(self._steps)) + 1
        width = self._console.width - _MIN_BAR - count - _ETA_COLUMNS - 3  # 3 spaces
        full, short = ([part[form] for part in parts] for form in (0, 1))
        fewest = min(len(full), _SHORT_PARTS)
        candidates = [full[:n] for n in range(len(full), fewest - 1, -1)]
        candidates += [short[:n] for n in range(fewest, 0, -1)]
        texts = ["  ".join(candidate) for candidate in candidates]
        text = next((text for text in texts if len(text) <= width), "")
        self._column.bar_width = min(_MAX_BAR, _MIN_BAR + width - len(text)) if width > 0 else 1
        return text

    def print(self, text: str) -> None:
        if self._shown:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
