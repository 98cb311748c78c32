"""Reading the kernel's small files: what cannot be read is None, and the reason is kept."""

import os
from pathlib import Path


class Files:
    """/sys and /proc below a root. `unknown` collects why a field of the Machine is unknown."""

    def __init__(self, unknown: dict[str, str], root: Path = Path("/")) -> None:
        self.unknown = unknown
        self.root = root

    def text(self, path: str, field: str | None = None) -> str | None:
        """The file's text without white space around it. `field` is what it would have told."""
        try:
            return self._at(path).read_text(errors="replace").strip()
        except OSError as error:
            self._note(field, f"{path}: {error.strerror}")
            return None

    def number(self, path: str, field: str | None = None) -> int | None:
        """The file's whole number."""
        text = self.text(path, field)
        if text is None:
            return None
        try:
            return int(text, 0)
        except ValueError:
            self._note(field, f"{path} says {text[:40]!r}")
            return None

    def bytes(self, path: str, field: str | None = None) -> bytes | None:
        """The file as it is."""
        try:
            return self._at(path).read_bytes()
        except OSError as error:
            self._note(field, f"{path}: {error.strerror}")
            return None

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; nothing where there is none."""
        try:
            return sorted(os.listdir(self._at(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        return self._at(path).exists()

    def target(self, path: str) -> str | None:
        """Where a link leads, as a path below the root."""
        place = self._at(path)
        if not place.exists():
            return None
        try:
            return "/" + str(place.resolve().relative_to(self.root.resolve()))
        except ValueError:
            return None

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _note(self, field: str | None, reason: str) -> None:
        if field is not None:
            self.unknown[field] = reason
