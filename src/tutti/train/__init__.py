"""Training: config, step, loop, optimizer and schedule, evaluation, checkpoints, run directory."""
