"""Data structures in symmetric memory. Each class documents when to use it, and when not.

- DistributedTensor: the rows of a large table, gathered and added to by index
- HashMap: values under 64-bit keys
- RingBuffer: a stream of slots from one rank to another, in the reader's memory
- ParameterCache: rows with versions, published by their owners, looked up by all ranks
- AdapterStore: sets of weights, prefetched in the background, switched in microseconds
- PooledCache: a cache that spills into peers' memory and to the host
"""

from tutti.structures.adapter_store import Adapter, AdapterStore
from tutti.structures.distributed_tensor import DistributedTensor
from tutti.structures.hash_map import Full, HashMap
from tutti.structures.parameter_cache import ParameterCache
from tutti.structures.pooled_cache import PooledCache
from tutti.structures.ring_buffer import ConsumerGone, EndOfStream, RingBuffer

__all__ = [
    "Adapter",
    "AdapterStore",
    "ConsumerGone",
    "DistributedTensor",
    "EndOfStream",
    "Full",
    "HashMap",
    "ParameterCache",
    "PooledCache",
    "RingBuffer",
]
