"""What goes wrong between ranks."""

from tutti.world.errors import RanksDiffer


class CollectiveError(RuntimeError):
    """An operation failed; the message names it, its place in the code and the backend's words."""


class CollectiveTimeout(CollectiveError):
    """Ranks did not arrive in time; the message says which, at which operation, and where."""


class CollectiveMismatch(CollectiveError, RanksDiffer):
    """Ranks called different operations, and the backend noticed."""
