"""Atomic file writes (no process reads a partly written file), and checks of paths."""

import errno
import os
import stat
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` with `content`: write a temporary file in the same folder, then rename it.

    If writing fails, the temporary file is removed and OSError is raised. A device or pipe such as
    /dev/stdout is written directly, because a rename would replace it with a file.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tutti-")
    try:
        with open(descriptor, "wb") as file:
            # mkstemp creates a file of mode 0600. Set the mode that open() would have set.
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(file.fileno(), 0o666 & ~umask)
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_output_file(path: Path) -> None:
    """Raise OSError if `write_atomically` cannot write this file. The file is not changed."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
        if not path.is_file():  # a device or a pipe, which is written directly
            return
    folder = path.parent
    if not folder.exists():
        raise FileNotFoundError(errno.ENOENT, f"the directory {folder} does not exist")
    _check_folder(folder)


def check_output_folder(path: Path) -> None:
    """Raise OSError if this directory cannot be created, or if no file can be created in it."""
    for place in (path, *path.absolute().parents):
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return _check_folder(place)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "is not a directory"
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} {problem}")
    try:
        # Create a file, because permissions do not show that a disk is full, or that even root
        # cannot create files in /proc. On most file systems the temporary file has no name, so
        # other processes do not see it.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"no file can be created in {folder} ({error.strerror})"
        raise OSError(error.errno, reason) from None


def check_input(path: Path, kind: str) -> None:
    """Raise OSError if a path cannot be read. `kind` is "file", "directory" or "any"."""
    mode = path.stat().st_mode
    is_folder = stat.S_ISDIR(mode)
    if is_folder and kind == "file":
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    if not is_folder and kind == "directory":
        raise NotADirectoryError(errno.ENOTDIR, "is not a directory")
    if not os.access(path, os.R_OK | (os.X_OK if is_folder else 0)):
        raise PermissionError(errno.EACCES, "no permission to read")
