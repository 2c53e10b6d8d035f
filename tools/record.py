#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a command that writes a JSON file, and keeps the file under results/ as a record.

    tools/record.py results/accuracy/gaussian.json build/bin/sagebwd trace --json {} ...

`{}` stands for the file that the command writes. The record also says how to repeat it: the
command, the commit, whether the tree had changes, and the date.
"""

import datetime
import json
import pathlib
import subprocess
import sys
import tempfile


def git(*args):
    return subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout.strip()


def main():
    if len(sys.argv) < 3 or "{}" not in sys.argv[2:]:
        sys.exit(__doc__)
    target, command = pathlib.Path(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder, "out.json")
        subprocess.run([str(written) if word == "{}" else word for word in command], check=True)
        # What the command says of itself names the record, not a file that is gone.
        record = json.loads(written.read_text().replace(str(written), str(target)))
    shown = (f'"{word}"' if " " in word else word for word in command)
    record["command"] = " ".join(["tools/record.py", str(target), *shown])
    record["commit"] = git("rev-parse", "HEAD")
    # Records themselves and the pages made from them do not count as changes.
    record["clean"] = not git("status", "--porcelain", "--", ".", ":!results", ":!README.md")
    record["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(f"{target}: commit {record['commit'][:12]}{'' if record['clean'] else ' with changes'}")


if __name__ == "__main__":
    main()
