# SPDX-License-Identifier: Apache-2.0
"""Makes a page of a record that ``sagebwd trace`` or ``sagebwd report`` wrote.

python -m sagebwd.pages report.json report.html
"""

import argparse
import json
import sys

from .document import render


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m sagebwd.pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("record", help="the JSON file; - for the standard input")
    parser.add_argument("page", help="the file to write")
    args = parser.parse_args(arguments)
    try:
        if args.record == "-":
            record = json.loads(sys.stdin.buffer.read())
        else:
            with open(args.record, "rb") as file:
                record = json.loads(file.read())
        if not isinstance(record, dict) or "page" not in record:
            raise ValueError(f'{args.record}: has no "page"; sagebwd trace and report write one')
        text = render(record["page"])
        with open(args.page, "w", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        parser.exit(2, f"sagebwd.pages: {error}\n")


if __name__ == "__main__":
    main()
