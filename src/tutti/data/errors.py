"""The one exception of this room that is a user's mistake and not a bug."""


class DataError(ValueError):
    """What is wrong with the data or with how it was asked for, in one line that names the cure."""
