"""Writing files so that other processes never read a partly written file."""

import os
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
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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
