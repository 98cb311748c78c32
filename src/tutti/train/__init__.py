"""Training: recipe, plan, step, loop, evaluation, checkpoints, run directory."""
