# SPDX-License-Identifier: Apache-2.0
"""Signals that end a run in good order."""

import os
import signal


class StopRequest:
    """Turns SIGTERM and SIGINT into a request that the loop obeys between two steps. Further
    signals change nothing: torchrun sends its ranks again what the terminal has already sent."""

    def __init__(self):
        self.wanted = None

    def __enter__(self):
        self._before = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:
                pass  # not the main thread: the caller's handlers stay
        return self

    def _note(self, number, frame):
        if self.wanted is None and os.environ.get("RANK", "0") == "0":
            # Not print: the signal may have come in the middle of one.
            text = f"{signal.Signals(number).name}: ends after this step, and saves\n"
            try:
                os.write(2, text.encode())
            except OSError:
                pass
        self.wanted = signal.Signals(number).name

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)
