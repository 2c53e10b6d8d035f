# SPDX-License-Identifier: Apache-2.0
"""Says how far a build is while pip shows nothing: on the terminal, where there is one, and
otherwise in the output that ``pip -v`` shows."""

import re
import sys
import threading
import time
from pathlib import Path

#: Seconds between two lines.
_PAUSE = 10


def steps_done(log):
    """The steps that ninja has finished, of all builds in this directory so far."""
    try:
        return log.read_text().count("\n")
    except OSError:
        return 0


def steps_planned(build_file):
    """The steps of a whole build; 0 before CMake has written them down."""
    try:
        text = build_file.read_text()
    except OSError:
        return 0
    return len(re.findall(r"^build [^:]*: (?:CXX|CUDA|C)_COMPILER", text, re.M))


class Progress:
    """Lines while the block runs: files compiled, and how long the rest takes at this pace."""

    def __init__(self, directory, out=None):
        self._log, self._file = Path(directory, ".ninja_log"), Path(directory, "build.ninja")
        self._out = out
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._own = self._out is None
        if self._own:
            try:
                self._out = open("/dev/tty", "w")
            except OSError:  # no terminal
                self._out, self._own = sys.stdout, False
        self._began, self._before = time.monotonic(), steps_done(self._log)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()
        if self._own:
            self._out.close()

    def _watch(self):
        while not self._over.wait(_PAUSE):
            if line := self.line(time.monotonic() - self._began):
                print(f"\n{line}", file=self._out, flush=True)

    def line(self, seconds):
        """What to say after that many seconds, or ""."""
        planned, done = steps_planned(self._file), steps_done(self._log) - self._before
        if not planned or done <= 0:
            return ""
        left = seconds / done * max(planned - done, 0)
        minutes = f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s"
        return f"sagebwd: {min(done, planned)} of {planned} files compiled, about {minutes} left"
