"""SysFiles: read /sys and /proc. If a value cannot be read, it is None and the reason is stored."""

import os
import re
from pathlib import Path


class SysFiles:
    """Reads files below `root`.

    `unknown` maps the path of a Machine field, such as `nics[0].mtu`, to the reason why the field
    could not be read. Methods with a `field` argument add such entries to `unknown`.
    """

    def __init__(self, unknown: dict[str, str] | None = None, root: Path = Path("/")) -> None:
        self.unknown = {} if unknown is None else unknown
        self.root = root

    def text(self, path: str, field: str | None = None) -> str | None:
        """Return the content of a file without leading and trailing white space."""
        content = self.bytes(path, field)
        return None if content is None else content.decode(errors="replace").strip()

    def number(self, path: str, field: str | None = None, valid: range | None = None) -> int | None:
        """Return the integer in a file, or None if there is no integer or it is not in `valid`."""
        text = self.text(path, field)
        if text is None:
            return None
        try:
            number = int(text, 0)
        except ValueError:
            self._note(field, f"{path} contains {text[:40]!r}")
            return None
        if valid is None or number in valid:
            return number
        self._note(field, f"{path} is {number}")
        return None

    def search(self, pattern: str, path: str, field: str | None = None) -> str | None:
        """Return the first group of the first match of `pattern` in a file, or None."""
        text = self.text(path, field)
        found = re.search(pattern, text or "", re.MULTILINE)
        if text is not None and found is None:
            self._note(field, f"{path} does not contain {pattern}")
        return found[1].strip() if found else None

    def numa_node(self, directory: str, field: str | None = None) -> int | None:
        """Return the NUMA node of a device, or None if the kernel reports -1 (unknown)."""
        return self.number(f"{directory}/numa_node", field, range(1 << 16))

    def bytes(self, path: str, field: str | None = None) -> bytes | None:
        """Return the raw content of a file."""
        try:
            return self._local(path).read_bytes()
        except OSError as error:
            self._note(field, f"{path}: {error.strerror}")
            return None

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory, or [] if the directory cannot be read."""
        try:
            return sorted(os.listdir(self._local(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return self._local(path).exists()

    def target(self, path: str) -> str | None:
        """Return the target of a symbolic link as a path below `root`, or None if it has none."""
        local = self._local(path)
        if not local.exists():
            return None
        try:
            return "/" + str(local.resolve().relative_to(self.root.resolve()))
        except ValueError:
            return None

    def target_name(self, path: str) -> str:
        """Return the last part of a symbolic link's target, such as a driver name.

        Return "" if the link does not exist.
        """
        return (self.target(path) or "").rpartition("/")[2]

    def _local(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _note(self, field: str | None, reason: str) -> None:
        if field is not None:
            self.unknown[field] = reason
