"""Benchmarks that check what they time: collectives, symmetric memory."""
