"""Who am I (rank, device, node), how was I started, start and stop, errors that name the cure."""
