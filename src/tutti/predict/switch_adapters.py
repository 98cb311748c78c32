"""Switches between LoRA adapters of one base model, without loading the base model again.

Rank 0 reads the adapter folders and puts every adapter into an AdapterStore. At a switch, each rank
copies its shards from the store's slot into the layers of its model:

    folders ── rank 0 ── put ──▶ slots on rank 0 ── fetch ──▶ slots on each rank ── copy ──▶ layers

The model has one LoRA layer for each module that any adapter changes, with the largest LoRA rank of
all adapters. An adapter with fewer modules or a smaller LoRA rank is padded with zeros, which do
not change its outputs.
"""

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tutti.comm.symmetric import Heap
from tutti.models.lora_layers import MATRICES, AdapterFolder, adapted_layers, adapter_layer
from tutti.parallel.engine import Engine
from tutti.parallel.materialize import copy_shard
from tutti.structures import AdapterStore

_ALIGNMENT = 4096  # bytes that the heap may add to an allocation


class Adapters:
    """The adapters of a model. Its LoRA layers have the largest LoRA rank of all adapters."""

    def __init__(self, engine: Engine, folders: list[AdapterFolder]) -> None:
        """Put all adapters into the store. All ranks must call this constructor."""
        self._model, self._folders = engine.model, folders
        self._layers = dict(adapted_layers(engine.model))
        self._weights = {
            f"{name}.{matrix}": adapter_layer(layer, matrix).weight
            for name, layer in self._layers.items()
            for matrix in MATRICES
        }
        template = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            for name, weight in self._weights.items()
        }
        slots = max(2, len(folders))
        size = sum(like.numel() * like.dtype.itemsize + 64 for like in template.values())
        self._heap = Heap(bytes=slots * (size + _ALIGNMENT) + (1 << 20))
        self._store = AdapterStore(self._heap, slots, template)
        if engine.world.is_first:
            for number, folder in enumerate(folders):
                self._store.put(str(number), _padded(folder, template))
        self._heap.barrier()

    @torch.no_grad()
    def activate(self, number: int) -> None:
        """Make an adapter active in this rank's layers. All ranks must call this method."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # gathered parameters would keep the values of the last adapter
        self._store.activate(str(number))
        with self._store.active() as adapter:
            for name, weight in self._weights.items():
                copy_shard(adapter[name], weight)
        for layer in self._layers.values():
            layer.scaling["default"] = self._folders[number].scale  # type: ignore[index, operator]

    def __enter__(self) -> "Adapters":
        return self

    def __exit__(self, *error: Any) -> None:
        """Free the store. All ranks free it together, unless this rank has an error."""
        self._store.__exit__(*error)
        self._heap.__exit__(*error)


def _padded(folder: AdapterFolder, template: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read the matrices of an adapter, padded with zeros to the shapes of the template."""
    tensors = {name: torch.zeros(like.shape, dtype=like.dtype) for name, like in template.items()}
    for name, saved in folder.tensors.items():
        with safe_open(saved.file, framework="pt") as file:
            rows, columns = saved.shape
            tensors[name][:rows, :columns] = file.get_tensor(saved.key)
    return tensors
