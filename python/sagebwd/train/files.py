# SPDX-License-Identifier: Apache-2.0
"""Files that are there as a whole or not at all, whatever happens while they are written, and files
that are read without trust: a device or a pipe in the place of one would never end."""

import errno
import os
import stat
from pathlib import Path

#: Bytes of a JSON file; those that the trainer writes are far smaller.
JSON_LIMIT = 64 << 20


def write_text(path, text):
    """Replaces the file at ``path``, flushed to the disk. An OSError leaves the old one. A symbolic
    link at ``path`` is replaced, not followed."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a process that was killed, or a link
        write_new(temporary, text)
        os.replace(temporary, path)
    except BaseException:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            pass  # the first error says more
        raise
    sync_directory(path.parent)


def write_new(path, text):
    """Writes a file that must not be there yet, not even as a symbolic link."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_bytes(path, limit=JSON_LIMIT):
    """The content of a regular file of at most ``limit`` bytes. Raises OSError for everything
    else."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        check_regular(file.fileno(), path)
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            words = f"it has {size} bytes, {limit} are the most"
            raise OSError(errno.EFBIG, words, str(path))
        raw = file.read(limit + 1)
    if len(raw) > limit:  # it grew, or is one of /proc, which say that they are empty
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return raw


def read_text(path, limit=JSON_LIMIT):
    """The same as text. A ValueError says that it is not UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def check_regular(where, path):
    """Raises OSError unless ``where`` (a path or a descriptor) is a regular file."""
    mode = os.stat(where).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "it is a directory", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file", str(path))


def sync_directory(path):
    """Makes renames within the directory last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
