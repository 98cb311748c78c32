"""Run a job with several numbers of ranks, and explain the loss of efficiency."""
