"""What can go wrong between ranks that share memory."""


class Timeout(TimeoutError):
    """What was waited for did not come in time; the message says from whom and how long."""


class PeerDied(RuntimeError):
    """The process of a rank has ended while this one waited for it. `rank` says which."""

    def __init__(self, rank: int, waiting_for: str) -> None:
        super().__init__(f"rank {rank} died while this rank waited for {waiting_for}")
        self.rank = rank


class PeerLeft(RuntimeError):
    """A rank closed the heap while this one waited for it. `rank` says which."""

    def __init__(self, rank: int, waiting_for: str) -> None:
        super().__init__(
            f"rank {rank} closed the heap while this rank waited for {waiting_for}: "
            "close it on all ranks together"
        )
        self.rank = rank
