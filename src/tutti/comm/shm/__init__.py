"""Collectives between ranks of one host through shared memory: the c10d backend `shm`."""
