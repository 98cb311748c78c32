"""Parity: the same training on one device and under a layout, compared number by number."""
