"""Text from prompts: batches of prompts, dealt out among data ranks, each token picked once.

A text longer than the model's window slides: token n is predicted from tokens w(n) .. n − 1, where
w(n) moves on by half a window whenever a whole one is full. Half a window is then computed again,
once for each half window of text; in between, each token costs one step of the cache.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.data.text_datasets import BYTES
from tutti.models.config import GPTConfig
from tutti.predict.decoder import Decoder
from tutti.predict.result_file import gather_text
from tutti.predict.sampling import Sampling
from tutti.world.errors import UsageError


@dataclass(frozen=True)
class Completion:
    """What follows a prompt."""

    index: int
    prompt: str
    text: str


class Generator:
    """Goes on with prompts. All ranks call `run` with the same ones."""

    def __init__(self, decoder: Decoder, config: GPTConfig, sampling: Sampling) -> None:
        self.decoder, self.config, self.sampling = decoder, config, sampling

    def run(self, prompts: Sequence[str], tokens: int, batch: int) -> Iterator[list[Completion]]:
        """The completions in the order of the prompts, as they come; empty lists but on rank 0."""
        coded = [encode(prompt, number, self.config) for number, prompt in enumerate(prompts)]
        grid = self.decoder.grid
        batches = [
            range(start, min(start + batch, len(coded))) for start in range(0, len(coded), batch)
        ]
        for turn in range(0, len(batches), grid.layout.data_ranks):
            these = batches[turn : turn + grid.layout.data_ranks]
            mine = these[grid.data_rank] if grid.data_rank < len(these) else range(0)
            steps = self._steps([coded[i] for i in mine], tokens)
            texts = self._complete([coded[i] for i in mine], mine, tokens) if mine else []
            if grid.layout.shard > 1:
                longest = max(self._steps([coded[i] for i in each], tokens) for each in these)
                self._help(longest - steps)
            said = [[i, text.hex()] for i, text in zip(mine, texts, strict=True)]
            gathered = gather_text(json.dumps(said if self.decoder.picks else []))
            rows = [row for told in gathered or [] for row in json.loads(told)]
            yield [
                Completion(i, _written(coded[i]), _written(bytes.fromhex(text)))
                for i, text in sorted(rows)
            ]

    def _complete(self, prompts: list[bytes], numbers: Sequence[int], tokens: int) -> list[bytes]:
        """All rows go on together from the shortest prompt's end: one length, one cache.

        A row whose prompt is longer takes its own next token until it is through.
        """
        lengths = [len(prompt) for prompt in prompts]
        start, end = min(lengths), max(lengths) + tokens
        text = torch.zeros(len(prompts), end, dtype=torch.int64)
        for row, prompt in zip(text, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(list(prompt))
        fed = window = -1
        for position in range(start, end):
            if window != self._window(position):
                fed = window = self._window(position)
                self.decoder.begin(min(end, self.config.max_seq_len))
            picked = self._next(text[:, fed:position], numbers, position)
            fed = position
            for row, length, token in zip(text, lengths, picked, strict=True):
                if position >= length:
                    row[position] = token
        return [
            bytes(row[length : length + tokens].tolist())
            for row, length in zip(text, lengths, strict=True)
        ]

    def _next(self, fed: Tensor, numbers: Sequence[int], position: int) -> list[int]:
        logits = self.decoder.feed(fed)
        picked = [0] * len(numbers)
        if logits is not None and self.decoder.picks:
            # A vocabulary may be padded: only bytes can be written.
            picked = self.sampling.pick(logits[:, :BYTES], numbers, position)
        return self.decoder.tell(picked)

    def _window(self, position: int) -> int:
        """Where the window begins that the token at `position` is predicted from."""
        longest = self.config.max_seq_len
        hop = longest - longest // 2
        return 0 if position <= longest else -(-(position - longest) // hop) * hop

    def _steps(self, prompts: list[bytes], tokens: int) -> int:
        """Forward passes that a batch takes."""
        lengths = [len(prompt) for prompt in prompts]
        return max(lengths) + tokens - min(lengths) if lengths else 0

    def _help(self, steps: int) -> None:
        """Run as often as the longest batch does: others gather parameters from this rank, too."""
        for _ in range(steps):
            self.decoder.begin(1)
            self._next(torch.zeros(1, 1, dtype=torch.int64), [0], 0)


def encode(prompt: str, number: int, config: GPTConfig) -> bytes:
    """The prompt as the bytes that are its tokens."""
    coded = prompt.encode(errors="surrogateescape")  # what the shell gave, byte for byte
    if not coded:
        raise UsageError(f"prompt {number} is empty: give at least one character")
    if max(coded) >= config.vocab_size:
        raise UsageError(
            f"prompt {number} has byte {max(coded)}, the model's vocabulary has "
            f"{config.vocab_size}: use characters that it knows"
        )
    return coded


def _written(text: bytes) -> str:
    """Bytes as characters; a model may say what is no UTF-8."""
    return text.decode(errors="replace")
