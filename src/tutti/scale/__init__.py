"""Run a job at several sizes, and explain the loss of efficiency."""
