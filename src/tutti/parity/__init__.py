"""Parity: the same training on one device and under a layout, and what differs between the two."""
