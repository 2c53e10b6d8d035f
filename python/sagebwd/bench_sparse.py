# SPDX-License-Identifier: Apache-2.0
"""``python -m sagebwd.bench_sparse``: the program is in tools/bench_sparse.py."""

from .tools.bench_sparse import main

if __name__ == "__main__":
    main()
