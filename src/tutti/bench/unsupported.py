"""What is raised where something cannot be measured here."""


class Unsupported(Exception):
    """This cannot be measured here; the message says why."""
