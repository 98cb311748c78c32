"""HashMap: a dictionary with 64-bit keys and values of one shape, distributed over all ranks."""

import ctypes
import math
from collections.abc import Callable

import torch

from tutti.comm.shm import native
from tutti.comm.symmetric.heap import Heap
from tutti.structures.structure_base import Structure, addable
from tutti.world.errors import UsageError

_RESERVED = 2**64 - 1
# Python looks up a global name faster than an attribute of torch. This matters, because HashMap.get
# takes only about 1 µs.
_empty_like = torch.empty_like


class Full(RuntimeError):
    """A shard of a HashMap has no free entry. The message states the limit and the fix."""


class HashMap(Structure):
    """A dictionary from uint64 keys to tensors of one shape and dtype, shared by all ranks.

    Use it for sparse state that any rank reads and changes: counts by token or user, embeddings of
    ids that are not row numbers, a directory of the data on each rank. Any rank can put, get, add
    and delete values at any time, and the rank that owns the key does not take part. A get takes
    about 1 µs, does not wait for writers and never returns a mixture of two values.

    Do not use it for dense row numbers (use DistributedTensor or ParameterCache), for values of
    different sizes (use PooledCache), or for an unbounded stream of new keys: a deleted key keeps
    its entry until all ranks call `compact()`. Each value takes twice its size in memory, so that
    a writer that is killed during a write leaves the last value intact.

    `capacity` is the number of keys over all ranks. Keys are distributed over the ranks by their
    hash, and each rank's shard has spare entries, because the distribution is not exactly even. Key
    2^64 - 1 is reserved. Values have `value_shape` and `dtype`, or are `value_bytes` raw bytes
    (uint8).
    """

    def __init__(
        self,
        heap: Heap,
        capacity: int,
        value_shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        value_bytes: int | None = None,
    ) -> None:
        super().__init__(heap, cpu_only=True)
        if capacity < 1:
            raise UsageError(f"capacity must be at least 1 key, got {capacity}")
        if value_bytes is not None:
            value_shape, dtype = (value_bytes,), torch.uint8
        self.capacity, self.value_shape, self.dtype = capacity, tuple(value_shape), dtype
        self._blank = torch.empty(self.value_shape, dtype=dtype)
        self._value_bytes = self._blank.numel() * dtype.itemsize
        entries = _entries(capacity, heap.size)
        memory = self._zeros((self._core.tutti_map_shard_bytes(entries, self._value_bytes),))
        self._native = self._core.tutti_map_create(
            self._addresses_of(memory), heap.size, heap.rank, entries, self._value_bytes
        )
        self._get = self._core_holding_gil.tutti_map_get
        self._writes = self._deletes = 0
        heap.barrier()

    def get(
        self, key: int, default: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return a copy of the value (in `out`, if given), or `default` if there is no value."""
        if not 0 <= key < _RESERVED:
            self._check_key(key)
        if out is None:
            out = _empty_like(self._blank)
        else:
            self._check_tensor("out", out, self.value_shape, contiguous=True)
        found = self._get(self._native, key, out.data_ptr())
        if found < 0:
            address = out.data_ptr()
            found = self._retry(lambda: self._get(self._native, key, address), f"get({key})")
        return out if found else default

    def put(self, key: int, value: torch.Tensor | float) -> bool:
        """Store a value, and return whether the key is new.

        If several ranks put the same key at the same time, the last put determines the value.
        """
        return self._write(key, value, self._core_holding_gil.tutti_map_put)

    def add(self, key: int, value: torch.Tensor | float) -> bool:
        """Add `value` to the value of `key`. Return whether the key is new.

        A missing value counts as zeros. No concurrent addition to a key is lost.
        """
        return self._write(
            key, value, self._core_holding_gil.tutti_map_add, addable(self.dtype, "add")
        )

    def delete(self, key: int) -> bool:
        """Delete a key, and return whether it was present. Only `compact` frees the key's entry."""
        self._check_key(key)
        self._deletes += 1
        call = self._core_holding_gil.tutti_map_delete
        return bool(self._retry(lambda: call(self._native, key), f"delete({key})"))

    def get_many(
        self, keys: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (values, found).

        `values` has shape (*keys.shape, *value_shape) and contains zeros for absent keys. `found`
        is a boolean mask of shape keys.shape.
        """
        checked = self._checked_keys(keys)
        out = self._output(out, (*keys.shape, *self.value_shape), contiguous=True)
        found = torch.empty(keys.shape, dtype=torch.bool)
        self._core.tutti_map_get_many(
            self._native, checked.data_ptr(), checked.numel(), out.data_ptr(), found.data_ptr()
        )
        return out, found

    def put_many(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `values[i]` under `keys[i]`, one key after another."""
        self._write_many(keys, values, -1)

    def add_many(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add `values[i]` to the value of `keys[i]`. All values of a repeated key are added."""
        self._write_many(keys, values, addable(self.dtype, "add_many"))

    def owner(self, key: int) -> int:
        """Return the rank whose memory holds a key."""
        self._check_key(key)
        return int(self._core_holding_gil.tutti_map_owner(self._native, key))

    def local_items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (keys, values) of this rank's shard.

        The keys are int64, so keys of 2^63 and above appear as negative numbers.
        """
        self._check_open()
        claimed = int(self._core.tutti_map_claimed(self._native, self.rank))
        keys = torch.empty(claimed, dtype=torch.int64)
        values = torch.empty((claimed, *self.value_shape), dtype=self.dtype)
        count = self._core.tutti_map_collect(
            self._native, claimed, keys.data_ptr(), values.data_ptr()
        )
        return keys[:count], values[:count]

    def compact(self) -> None:
        """Free the entries of deleted keys.

        All ranks must call this method, and no rank may use the map during the call.
        """
        self._check_open()
        self.heap.barrier()
        code = self._core.tutti_map_compact(self._native)
        self.heap.barrier()
        if code < 0:
            raise MemoryError(f"compact() cannot allocate a copy of rank {self.rank}'s shard")

    def __contains__(self, key: int) -> bool:
        self._check_key(key)
        return bool(self._core_holding_gil.tutti_map_has(self._native, key))

    def __getitem__(self, key: int) -> torch.Tensor:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: int, value: torch.Tensor | float) -> None:
        self.put(key, value)

    def __len__(self) -> int:
        self._check_open()
        return sum(self._live(rank) for rank in range(self.size))

    def stats(self) -> dict[str, int | list[int]]:
        """Return the call counts of this rank, and the numbers of keys in all shards."""
        self._check_open()
        core, handle = self._core, self._native
        keys = [self._live(rank) for rank in range(self.size)]
        return {
            "gets": core.tutti_map_gets(handle),
            "hits": core.tutti_map_hits(handle),
            "writes": self._writes,
            "deletes": self._deletes,
            "retries": core.tutti_map_retries(handle),
            "keys": keys,
            "deleted_keys": [core.tutti_map_claimed(handle, r) - n for r, n in enumerate(keys)],
            "limit_per_rank": core.tutti_map_limit(handle),
        }

    def _release(self) -> None:
        self._get = self._refuse
        self._core.tutti_map_free(self._native)

    def _declare_dead(self, rank: int) -> None:
        self._core.tutti_map_declare_dead(self._native, rank)

    def _live(self, rank: int) -> int:
        return int(self._core.tutti_map_live(self._native, rank))

    def _write(
        self, key: int, value: torch.Tensor | float, call: Callable[..., int], *dtype_code: int
    ) -> bool:
        if not 0 <= key < _RESERVED or self.closed:
            self._check_key(key)
        if not isinstance(value, torch.Tensor):
            value = torch.full(self.value_shape, value, dtype=self.dtype)
        elif value.shape != self.value_shape or value.dtype is not self.dtype or not value.is_cpu:
            self._check_tensor("value", value, self.value_shape)
        source = value if value.is_contiguous() else value.contiguous()
        address = source.data_ptr()
        self._writes += 1
        code = call(self._native, key, address, *dtype_code)
        if code < 0:
            code = self._retry(
                lambda: call(self._native, key, address, *dtype_code), f"write of key {key}"
            )
        if code == native.FULL:
            self._refuse_full(key)
        return bool(code)

    def _write_many(self, keys: torch.Tensor, values: torch.Tensor, dtype: int) -> None:
        checked = self._checked_keys(keys)
        self._check_tensor("values", values, (*keys.shape, *self.value_shape))
        source = values.contiguous()
        code = ctypes.c_int(0)
        done = 0

        def write_rest() -> int:
            nonlocal done
            done += self._core.tutti_map_put_many(
                self._native,
                checked.data_ptr() + 8 * done,
                checked.numel() - done,
                source.data_ptr() + self._value_bytes * done,
                dtype,
                ctypes.addressof(code),
            )
            return code.value

        self._retry(write_rest, "write of many keys")
        self._writes += done
        if code.value == native.FULL:
            self._refuse_full(int(checked.reshape(-1)[done]) % 2**64)

    def _check_key(self, key: int) -> None:
        self._check_open()
        if not 0 <= key < _RESERVED:
            raise UsageError(f"key {key} is out of range: keys are 0 to 2^64 - 2")

    def _checked_keys(self, keys: torch.Tensor) -> torch.Tensor:
        self._check_open()
        if keys.dtype not in (torch.int64, torch.uint64) or not keys.is_cpu:
            raise UsageError(f"keys are {keys.dtype} on {keys.device}: use int64 or uint64 on CPU")
        contiguous = keys.contiguous()
        if bool((contiguous.view(torch.int64) == -1).any()):
            raise UsageError("keys contain 2^64 - 1 (-1 as int64), which is reserved")
        return contiguous

    def _refuse_full(self, key: int) -> None:
        rank = self.owner(key)
        limit = int(self._core.tutti_map_limit(self._native))
        live = self._live(rank)
        raise Full(
            f"no entry is free for key {key}: the shard of rank {rank} holds {live} keys and "
            f"{limit - live} deleted keys, and its limit is {limit} (capacity {self.capacity} over "
            f"{self.size} ranks). Create the map with a larger capacity"
            + (", or call compact() on all ranks" if live < limit else "")
        )


def _entries(capacity: int, size: int) -> int:
    """Return the number of entries of a shard, a power of 2, for `capacity` keys in all shards.

    The number of keys in a shard is binomially distributed. It exceeds the mean plus six standard
    deviations with a probability of about 10^-9. An eighth of the entries stays free.
    """
    mean = capacity / size
    max_keys = min(capacity, mean + 6 * math.sqrt(mean) + 1)
    return max(8, 1 << math.ceil(math.log2(max_keys * 8 / 7 + 1)))
