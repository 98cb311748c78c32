"""Launchers, rendezvous, placement, liveness and supervision of ranks."""
