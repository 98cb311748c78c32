"""Launchers, rendezvous, rank placement, failure detection and supervision of local ranks."""
