"""`tutti bench collectives`: every collective on every backend, interleaved in one run."""

# The names that --backends accepts.
BACKENDS = ("gloo", "shm", "symmetric", "one-shot", "two-shot", "ring", "staged", "mpi", "nccl")
