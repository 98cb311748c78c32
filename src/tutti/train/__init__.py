"""Training: recipe, batch schedule, step, loop, evaluation, checkpoints, run directory."""
