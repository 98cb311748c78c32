"""Data structures in symmetric memory. Each class documents when to use it and when not to.

- DistributedTensor: a large table, sharded by rows, with gather and scatter-add by row index
- HashMap: a dictionary with 64-bit keys, distributed over all ranks
- RingBuffer: a bounded queue from one rank to another, in the consumer's memory
- ParameterCache: a table of versioned rows, published by their owners and read by all ranks
- AdapterStore: sets of weights, prefetched in the background, switched in microseconds
- PooledCache: a cache that moves values to the memory of other ranks and of the host
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
