# SPDX-License-Identifier: Apache-2.0
"""``python -m sagebwd info`` says what this machine can run; ``--cmake-dir`` prints the directory
of the C++ package."""

import argparse


def _info():
    import torch

    from . import __version__, _library
    from ._ops import attention as ops

    print(
        f"sagebwd {__version__}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads"
    )
    print(f"built for {_library.build()}")
    print(f"libraries {_library.cmake_dir().parent.parent}")
    print(f"autograd of eager calls in {_library.autograd}")
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        q = torch.empty(1, 1, 128, 64, dtype=dtype, device=device)
        for direction in ("forward", "backward"):
            print(f"{device} {direction}, head dim 64, {str(dtype)[6:]}:")
            for name, state, note in ops.explain(
                q, q, q, ops.Options(), is_backward=direction == "backward"
            ):
                what = {"chosen": "used, tiles ", "able": "able, tiles ", "no": "declines: "}[state]
                print(f"  {name:18} {what}{note}")
    if "cuda" not in devices:
        print("cuda: no device")


def main():
    parser = argparse.ArgumentParser(prog="python -m sagebwd", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["info"], help="what this machine can run")
    parser.add_argument(
        "--cmake-dir", action="store_true", help="print the directory for find_package(sagebwd)"
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    args = parser.parse_args()
    if args.cmake_dir:
        from ._library import cmake_dir

        print(cmake_dir())
    elif args.version:
        from . import __version__

        print(__version__)
    elif args.command == "info":
        _info()
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
