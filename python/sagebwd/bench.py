# SPDX-License-Identifier: Apache-2.0
"""``python -m sagebwd.bench``: the program is in tools/bench.py."""

from .tools.bench import main

if __name__ == "__main__":
    main()
