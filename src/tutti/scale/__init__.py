"""`tutti scale`: run a job with several numbers of ranks, and explain the lost efficiency."""
