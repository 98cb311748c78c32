"""Generate text from prompts with a GPT under any layout.

    dp     each data rank has its own prompts
    shard  a block gathers its parameters in forward, so all data ranks must run the same number of
           forward passes
    tp     each rank has some of the heads, with their keys and values; logits are gathered
    pp     hidden states are sent from stage to stage; each stage has the caches of its own blocks

In each data-parallel replica, one rank (the sampling rank) has the logits. This rank picks the
tokens and broadcasts them to the other ranks of the replica.

A text may be longer than the model's context. Whenever the context is full, its first half is
dropped, and the model processes the second half again, which refills the key-value cache.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutti import comm
from tutti.data.dataset_files import BYTE_VOCABULARY_SIZE
from tutti.data.sampler import hash_integers
from tutti.models.config import GPTConfig
from tutti.models.gpt import GPT, KVCache
from tutti.models.lora_layers import (
    AdapterFolder,
    LoraOptions,
    add_adapters,
    check_adapter_fits,
)
from tutti.models.pretrained import HuggingFaceFolder, end_tokens, load_tokenizer
from tutti.parallel.engine import Engine
from tutti.parallel.layout import Layout
from tutti.parallel.materialize import AdapterWeights, ModuleInit, Weights
from tutti.predict.predict_dataset import TrainedRun, gather_text, place_model
from tutti.train.checkpoint import Loaded
from tutti.train.init import agree, build_meta_model
from tutti.world.errors import UsageError
from tutti.world.world import World


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token; see the flags of tutti predict.

    The random number of a token is a hash of (seed, index of the prompt, position), and the draw is
    made in float64 on the CPU, so the same logits give the same text in every layout.
    """

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature must be at least 0, got {self.temperature:g}")
        if self.top_k < 0:
            raise UsageError(f"--top-k must be at least 0, got {self.top_k}")

    def pick(self, logits: Tensor, prompts: Sequence[int], position: int) -> list[int]:
        """Return one token for each row of `logits`, which has shape (rows, vocabulary).

        `prompts` contains the prompt index of each row.
        """
        table = logits.double().cpu().numpy()
        if not np.isfinite(table).all():
            raise UsageError("the model's logits are not finite: use an earlier --checkpoint")
        numbers = [uniform(self.seed, prompt, position) for prompt in prompts]
        return [self._draw(row, number) for row, number in zip(table, numbers, strict=True)]

    def _draw(self, logits: npt.NDArray[np.float64], number: float) -> int:
        if self.temperature == 0:
            return int(logits.argmax())  # the first of equally likely tokens
        # The maximum is subtracted first, so that a temperature near 0 gives 0 and -inf, not NaN.
        with np.errstate(over="ignore"):
            scaled = (logits - logits.max()) / self.temperature
        if 0 < self.top_k < len(scaled):
            threshold = np.partition(scaled, -self.top_k)[-self.top_k]
            scaled = np.where(scaled >= threshold, scaled, -np.inf)
        cumulative = np.exp(scaled).cumsum()
        token = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
        # Rounding may make the drawn number equal to the total of all weights. Then the last token
        # with a nonzero weight is used.
        return min(token, int(np.flatnonzero(scaled > -np.inf)[-1]))


def uniform(seed: int, prompt: int, position: int) -> float:
    """Return a random number in [0, 1). It is the same on every machine."""
    return (hash_integers(seed, prompt, position) >> 11) / (1 << 53)


class TextModel(ABC):
    """How a model reads and writes text: its tokens, its context and its key-value cache."""

    vocabulary: int
    """Only tokens below this number are picked, because the model's logits may include padding."""
    max_seq_len: int
    width: int
    """Width of the hidden states that pipeline stages exchange."""
    ends: Collection[int] = ()
    """The tokens after which generation stops."""

    @abstractmethod
    def encode(self, prompt: str, number: int) -> list[int]:
        """Return the tokens of a prompt. Raise UsageError if the model cannot use the prompt."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    @abstractmethod
    def cache(self, capacity: int) -> dict[str, Any]:
        """Return keyword arguments of forward with an empty cache for `capacity` tokens."""


class ByteText(TextModel):
    """A GPT whose tokens are bytes."""

    def __init__(self, config: GPTConfig) -> None:
        self.vocabulary, self.width = BYTE_VOCABULARY_SIZE, config.dim
        self.max_seq_len = config.max_seq_len
        self._model_vocabulary = config.vocab_size

    def encode(self, prompt: str, number: int) -> list[int]:
        encoded = prompt.encode(errors="surrogateescape")  # the bytes that the shell passed
        if not encoded:
            raise UsageError(f"prompt {number} is empty: give at least one character")
        if max(encoded) >= self._model_vocabulary:
            raise UsageError(
                f"prompt {number} has byte {max(encoded)}, but the model's vocabulary has only "
                f"{self._model_vocabulary} tokens: use bytes below {self._model_vocabulary}"
            )
        return list(encoded)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")  # generated bytes may not be valid UTF-8

    def cache(self, capacity: int) -> dict[str, Any]:
        return {"cache": KVCache(capacity)}


class TokenizerText(TextModel):
    """A model of transformers, with the tokenizer of its folder."""

    def __init__(self, folder: HuggingFaceFolder) -> None:
        self._tokenizer = load_tokenizer(folder)
        self.vocabulary = folder.vocabulary or len(self._tokenizer)
        self.max_seq_len = folder.max_seq_len or 1 << 30
        self.width = 0
        self.ends = end_tokens(folder)

    def encode(self, prompt: str, number: int) -> list[int]:
        tokens: list[int] = self._tokenizer(prompt)["input_ids"]
        if not tokens:
            raise UsageError(f"prompt {number} has no tokens: give at least one character")
        if max(tokens) >= self.vocabulary:
            raise UsageError(
                f"prompt {number} has token {max(tokens)}, but the model's vocabulary has only "
                f"{self.vocabulary} tokens: use the tokenizer of this model"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def cache(self, capacity: int) -> dict[str, Any]:
        from transformers import DynamicCache

        return {"past_key_values": DynamicCache(), "use_cache": True}


def place_gpt(
    world: World, run: TrainedRun, layout: Layout, config: GPTConfig
) -> tuple["Generator", Loaded]:
    """Place the run's GPT under a layout, for decoding. All ranks must call this function."""
    with torch.device("meta"):
        model = GPT(config)
    weights: Weights = ModuleInit(model, seed=0)
    model = model.to(run.dtype)
    if (lora := run.recipe.lora) is not None:
        agree(lambda: add_adapters(model, LoraOptions.parse(lora)))
        weights = AdapterWeights(weights, seed=0)
    tokens = torch.zeros(1, config.max_seq_len, dtype=torch.int64, device=world.device)
    engine = place_model(model, weights, world, layout, tokens, batch=1)
    loaded = run.load(engine)
    engine.model.eval()
    return Generator(engine, ByteText(config), run.dtype), loaded


def place_hugging_face(
    world: World,
    run: TrainedRun,
    layout: Layout,
    text: TokenizerText,
    adapters: Sequence[AdapterFolder] = (),
) -> tuple["Generator", Loaded]:
    """Place a Hugging Face model under a layout, for decoding. All ranks must call this function.

    The model gets LoRA layers for the given adapters, but their weights are not loaded.
    """
    if layout.pp > 1:
        raise UsageError(
            f"layout {layout}: Hugging Face models cannot generate with pp: use dp, shard or tp"
        )

    def build() -> tuple[nn.Module, Weights, list[str]]:
        model, weights, notes = build_meta_model(
            run.recipe, None, saved_weights=not run.has_checkpoint
        )
        for adapter in adapters:
            check_adapter_fits(adapter, model)
        if adapters:
            targets = tuple({layer: None for adapter in adapters for layer in adapter.layers})
            rank = max(adapter.rank for adapter in adapters)
            add_adapters(model, LoraOptions(rank, rank, targets=targets))
            weights = AdapterWeights(weights, seed=0)
        return model, weights, notes

    model, weights, notes = agree(build)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=world.device)
    engine = place_model(model, weights, world, layout, tokens, batch=1)
    loaded = Loaded(0, run.path, world.size, {}, tuple(notes))
    if run.has_checkpoint:
        loaded = run.load(engine)
    engine.model.eval()
    return Generator(engine, text, next(engine.model.parameters()).dtype), loaded


@dataclass(frozen=True)
class Completion:
    """The generated text of a prompt."""

    index: int
    prompt: str
    text: str
    tokens: int  # number of generated tokens


class Generator:
    """Completes prompts with this rank's part of a model and its key-value cache."""

    def __init__(self, engine: Engine, text: TextModel, dtype: torch.dtype) -> None:
        self.engine, self.model, self.mesh = engine, engine.model, engine.mesh
        self.text, self.dtype, self.device = text, dtype, engine.world.device
        self.stage, self.last_stage = self.mesh.rank("pp"), self.mesh.layout.pp - 1
        # In each data-parallel replica, this rank has the logits and picks the tokens.
        self.is_sampling_rank = self.stage == self.last_stage and self.mesh.rank("tp") == 0
        self._cache: dict[str, Any] = {}

    def run(
        self, prompts: Sequence[str], tokens: int, batch: int, sampling: Sampling
    ) -> Iterator[list[Completion]]:
        """Yield completions in the order of the prompts; on ranks other than 0, yield empty lists.

        All ranks must call this method.
        """
        encoded = [self.text.encode(prompt, number) for number, prompt in enumerate(prompts)]
        data_rank, data_ranks = self.mesh.data_rank, self.mesh.layout.data_ranks
        starts = range(0, len(encoded), batch)
        batches = [range(start, min(start + batch, len(encoded))) for start in starts]
        for first in range(0, len(batches), data_ranks):
            scattered = batches[first : first + data_ranks]
            own_batch = scattered[data_rank] if data_rank < len(scattered) else range(0)
            texts = (
                self._complete([encoded[i] for i in own_batch], own_batch, tokens, sampling)
                if own_batch
                else []
            )
            if self.mesh.layout.shard > 1:
                # All data ranks gather parameters from each other in each forward pass. So every
                # data rank must run as many passes as the data rank that needs the most.
                lengths = [[len(encoded[i]) for i in numbers] for numbers in scattered]
                steps = [max(group) + tokens - min(group) for group in lengths]
                for _ in range(max(steps) - (steps[data_rank] if own_batch else 0)):
                    self._cache = self.text.cache(1)
                    self._next_tokens(torch.zeros(1, 1, dtype=torch.int64), [0], 0, sampling)
            rows = list(zip(own_batch, texts, strict=True))
            gathered = gather_text(json.dumps(rows if self.is_sampling_rank else []))
            yield [
                Completion(i, prompts[i], self.text.decode(text), len(text))
                for i, text in sorted(row for rows in gathered for row in json.loads(rows))
            ]

    def _complete(
        self, prompts: list[list[int]], numbers: Sequence[int], tokens: int, sampling: Sampling
    ) -> list[list[int]]:
        """Complete a batch of prompts, with one cache.

        Generation begins for all rows after the last token of the shortest prompt. In the row of a
        longer prompt, generated tokens are replaced by the prompt's own tokens until it ends.
        """
        lengths = [len(prompt) for prompt in prompts]
        start, end = min(lengths), max(lengths) + tokens
        text = torch.zeros(len(prompts), end, dtype=torch.int64)
        for row, prompt in zip(text, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        first_unfed = window_start = -1
        for position in range(start, end):
            if window_start != self._window_start(position):
                first_unfed = window_start = self._window_start(position)
                self._cache = self.text.cache(min(end, self.text.max_seq_len))
            picked = self._next_tokens(text[:, first_unfed:position], numbers, position, sampling)
            first_unfed = position
            for row, length, token in zip(text, lengths, picked, strict=True):
                if position >= length:
                    row[position] = token
            # With shard, all data ranks must run the same number of forward passes, so no rank
            # stops early.
            rows = [row[: position + 1].tolist() for row in text]
            if self.mesh.layout.shard == 1 and all(
                self._ends(row[length:]) or len(row) >= length + tokens
                for row, length in zip(rows, lengths, strict=True)
            ):
                break
        return [
            self._until_end(row[length : length + tokens])
            for row, length in zip(rows, lengths, strict=True)
        ]

    def _ends(self, tokens: list[int]) -> bool:
        return any(token in self.text.ends for token in tokens)

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Return the tokens up to and including the first token that ends a text."""
        ends = [number for number, token in enumerate(tokens) if token in self.text.ends]
        return tokens[: ends[0] + 1] if ends else tokens

    def _window_start(self, position: int) -> int:
        """Return the first position that is in the context when `position` is predicted."""
        context = self.text.max_seq_len
        hop = context - context // 2
        return 0 if position <= context else -(-(position - context) // hop) * hop

    def _next_tokens(
        self, new: Tensor, numbers: Sequence[int], position: int, sampling: Sampling
    ) -> list[int]:
        """Feed tokens of shape (rows, new) to the model. Return the next token of each row.

        All ranks of a replica return the same tokens.
        """
        logits = self._feed(new)
        picked = [0] * len(numbers)
        if logits is not None and self.is_sampling_rank:
            picked = sampling.pick(logits[:, : self.text.vocabulary], numbers, position)
        values = torch.tensor(picked, device=self.device)
        if self.mesh.layout.tp > 1 and self.stage == self.last_stage:
            comm.broadcast(values, 0, group=self.mesh.group("tp"))
        if self.last_stage > 0:
            comm.broadcast(values, self.last_stage, group=self.mesh.group("pp"))
        return values.tolist()

    @torch.no_grad()
    def _feed(self, tokens: Tensor) -> Tensor | None:
        """Feed tokens of shape (rows, new) to the model. Return the logits after the last token.

        Pipeline stages before the last one return None.
        """
        hidden = tokens.to(self.device)
        if self.stage > 0:
            shape = (*tokens.shape, self.text.width)
            hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
            comm.recv(hidden, self.stage - 1, group=self.mesh.group("pp"))
        outputs: Tensor = self.model(hidden, **self._cache)
        if self.stage < self.last_stage:
            comm.send(outputs, self.stage + 1, group=self.mesh.group("pp"))
            return None
        last = outputs[:, -1]
        return last.full_tensor() if isinstance(last, DTensor) else last
