# SPDX-License-Identifier: Apache-2.0
"""What a mistyped word was probably meant to be, at the end of error messages."""

import argparse
import difflib
import re


def did_you_mean(word, known):
    """``; did you mean 'paper'?``, or nothing where no known word is near."""
    by_lower = {str(name).lower(): str(name) for name in known}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.7)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Names the nearest option or choice when one does not exist."""

    def error(self, message):
        super().error(message + self._suggestion(message))

    def _suggestion(self, message):
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            return did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
        if message.startswith("unrecognized arguments:"):
            for word in message.split(":", 1)[1].split():
                if word.startswith("-"):
                    return did_you_mean(word.split("=")[0], self._option_string_actions)
        return ""
