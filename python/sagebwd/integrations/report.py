# SPDX-License-Identifier: Apache-2.0
"""What a hook saw: the calls that ran here, and those that ran elsewhere, each with its reason.

A hook that does nothing must not look like one that works. Each hook therefore gives its user a
:class:`Report`, and warns once per reason why a call did not run here and what would change that.
"""

import threading
import warnings
from collections import Counter


class Report:
    """``calls`` counts attention calls that ran in INT8. ``passed_on`` counts calls that ran
    elsewhere, by reason; ``refused`` counts those that raised, by reason.

    Calls of compiled code are counted when they are traced; with torch_sdpa, when they run.
    """

    def __init__(self, hook):
        self.hook = hook
        self.calls = 0
        self.passed_on = Counter()
        self.refused = Counter()
        self._lock = threading.Lock()

    def __repr__(self):
        others = ", ".join(
            f"{name}: {dict(reasons)}"
            for name, reasons in (("passed on", self.passed_on), ("refused", self.refused))
            if reasons
        )
        return f"<{self.hook}: {self.calls} calls ran here{', ' if others else ''}{others}>"

    def ran(self):
        """Counts a call that ran here."""
        with self._lock:
            self.calls += 1

    def pass_on(self, reason, *, warn=True):
        """Counts a call that runs elsewhere, and warns the first time."""
        with self._lock:
            self.passed_on[reason] += 1
            first = self.passed_on[reason] == 1
        if first and warn:
            warnings.warn(f"sagebwd: the original attention runs instead: {reason}", stacklevel=4)

    def refuse(self, reason):
        """The error for a call that cannot run here."""
        with self._lock:
            self.refused[reason] += 1
        return NotImplementedError(
            f"sagebwd: {reason} ({self.hook}.enabled(fallback=True) runs the original attention "
            "for such calls)"
        )

    def close(self, remedy):
        """The end of a block: says so if no call came at all."""
        if self.calls == 0 and not self.passed_on and not self.refused:
            warnings.warn(f"sagebwd: {self.hook} saw no attention call. {remedy}", stacklevel=4)
