# SPDX-License-Identifier: Apache-2.0
"""Files that are there as a whole or not at all, whatever happens while they are written."""

import os


def write_text(path, text):
    """Replaces the file at ``path``, flushed to the disk. An OSError leaves the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_new(temporary, text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_new(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path):
    """Makes renames within the directory last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
