"""Benchmarks: collectives, bandwidth of links, symmetric memory, and pairs of techniques."""


class Unsupported(Exception):
    """A backend, an operation or a pair cannot be measured here. The message is the reason."""
