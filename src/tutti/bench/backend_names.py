"""The backends of `tutti bench collectives`, by the names that --backends takes."""

BACKENDS = (
    *("gloo", "shm", "symmetric", "one-shot", "two-shot", "ring"),
    *("staged", "mpi", "nccl"),
)
