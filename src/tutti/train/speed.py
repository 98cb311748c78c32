"""How fast a run is: samples, tokens and MFU, each with its formula or the word unknown."""

from typing import Any

import torch

from tutti.machine.catalogue import peak_flops
from tutti.models.config import GPTConfig
from tutti.train.pulse import Beat
from tutti.world.world import World


class Speed:
    """Samples per second since the first pulse, which holds compilation and warm-up."""

    def __init__(self, world: World, precision: str, architecture: object, seq_len: int) -> None:
        self._world = world
        self._gpt = architecture if isinstance(architecture, GPTConfig) else None
        self._seq_len = seq_len
        self._peak: tuple[float, str] | None = None
        if self._gpt is not None and world.device.type == "cuda":
            tf32 = torch.backends.cuda.matmul.allow_tf32
            self._peak = peak_flops(torch.cuda.get_device_name(world.device), precision, tf32)
        self._samples = 0
        self._seconds = 0.0
        self.samples_per_s: float | None = None

    def describe(self, beat: Beat, samples: int) -> str:
        """Count a pulse with this many samples; returns the line for the progress report."""
        rate = samples / beat.seconds
        if self.samples_per_s is None:
            self.samples_per_s = rate  # better than nothing, should no other pulse come
        else:
            self._samples += samples
            self._seconds += beat.seconds
            self.samples_per_s = self._samples / self._seconds
        text = f"{rate:,.0f} samples/s  {1000 * beat.seconds / len(beat.losses):.1f} ms/step"
        if self._gpt is None:
            return text
        mfu = self._mfu(rate)
        shown = "unknown" if mfu is None else f"{100 * mfu:.1f} %"
        return f"{text}  {rate * self._seq_len:,.0f} tokens/s  MFU {shown}"

    def summary(self) -> dict[str, Any]:
        """What the summary of a run says of its speed."""
        if self._gpt is None or self.samples_per_s is None:
            return {}
        flops = self._gpt.flops_per_token(self._seq_len)
        return {
            "tokens_per_s": self.samples_per_s * self._seq_len,
            "mfu": self._mfu(self.samples_per_s),
            "mfu_formula": (
                f"tokens/s × {flops:,} FLOP per token (6 N + 12 L d s) / "
                f"({self._world.size} ranks × peak)"
            ),
            "mfu_peak": "unknown device" if self._peak is None else self._peak[1],
        }

    def _mfu(self, samples_per_s: float) -> float | None:
        if self._gpt is None or self._peak is None:
            return None
        flops = self._gpt.flops_per_token(self._seq_len)
        # Ranks that share a GPU share its peak as well.
        devices = self._world.size / self._world.ranks_on_device
        return samples_per_s * self._seq_len * flops / (devices * self._peak[0])
