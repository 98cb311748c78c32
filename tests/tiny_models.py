"""Models of other libraries for tests: parts of tiny Hugging Face models, and torchvision."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def save_tokenizer(path: Path) -> None:
    """Save a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def save_tokens(path: Path) -> None:
    """Save a text as a dataset of tokens, which are bytes."""
    words = ("the cat sat on a mat", "and then it went away", "to the house")
    text = " ".join(words[number % 11 % len(words)] for number in range(7, 7000, 7))
    for name in ("train.bin", "test.bin"):
        (path / name).write_bytes(text.encode())
    (path / "tokens.json").write_text('{"dtype": "uint8", "vocabulary": 256}')


def torchvision_or_skip() -> Any:
    """Import torchvision, from the directory that `make test` fills where it is not installed.

    timm is in the same directory. This torchvision may be a build for CUDA beside a torch for the
    CPU: then its library cannot be loaded, and its Python code needs the names of two operators.
    """
    sys.path.append(str(Path(sys.prefix, "timm")))
    try:
        import torchvision
    except ModuleNotFoundError:
        pytest.skip("torchvision is not installed: `make test` installs it")
    except RuntimeError:
        operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision
