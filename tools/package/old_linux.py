# SPDX-License-Identifier: Apache-2.0
"""Lets this machine's compiler link for older Linux systems.

    old_linux.py DIR       then link with -L DIR, and programs with -Wl,--wrap=__libc_start_main too

A library of glibc or libstdc++ keeps the old versions of its symbols, but a linker takes the newest
one. DIR gets a stub of each library that has only the versions that manylinux_2_28 allows, and a
linker script that adds what is newer: of libstdc++ its own archive, and of glibc the few functions
of old_linux.c.
"""

import re
import subprocess
import sys
from pathlib import Path

#: The newest versions on manylinux_2_28 (RHEL 8): glibc 2.28, and libstdc++ of GCC 8.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
#: What libc held elsewhere until glibc 2.34.
MOVED = {"libdl.so.2": r"dl[a-z]+\d?", "libpthread.so.0": r"(pthread|sem)_\w+"}

SYMBOL = re.compile(
    r"^ *\d+: [0-9a-f]+ +(\w+) (\w+) +(?:GLOBAL|WEAK|UNIQUE) +\w+ +(?!UND)\w+ (\S+?)(@@?)(\S+)$",
    re.M,
)
ALLOWED = re.compile(rf"({'|'.join(NEWEST)})_([\d.]+)$")


#: The assembler's section and type for a kind of symbol; data by default.
SECTIONS = {
    "FUNC": (".text", "function"),
    "IFUNC": (".text", "function"),
    "TLS": ('.section .tbss,"awT",@nobits', "tls_object"),
}


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def found(name):
    """Where the compiler has a library."""
    path = run("g++", f"-print-file-name={name}").strip()
    if path == name:
        sys.exit(f"old_linux.py: the compiler has no {name}")
    return path


def symbols(library, hidden):
    """{name: (version, kind, size)} with the newest version that is old enough. ``hidden``: also of
    those that a linker would not take by itself, as it finds a newer one."""
    best = {}
    for size, kind, name, at, version in SYMBOL.findall(
        run("readelf", "-W", "--dyn-syms", library)
    ):
        allowed = ALLOWED.match(version)
        number = allowed and tuple(map(int, allowed[2].split(".")))
        if allowed and number <= NEWEST[allowed[1]] and (hidden or at == "@@"):
            if name not in best or number > best[name][0]:
                best[name] = number, version, kind, int(size, 0)
    return {name: found[1:] for name, found in best.items()}


def write_stub(directory, soname, held):
    """A library without code."""
    lines = []
    for i, (name, (version, kind, size)) in enumerate(held.items()):
        section, word = SECTIONS.get(kind, (".bss", "object"))
        lines += [
            f"{section}\n.globl stub_{i}\n.type stub_{i}, @{word}\nstub_{i}: .skip {max(size, 1)}"
            f"\n.size stub_{i}, {size}\n.symver stub_{i}, {name}@@{version}"
        ]
    source, script = directory / f"{soname}.s", directory / f"{soname}.map"
    source.write_text("\n".join(lines) + "\n")
    versions = sorted({version for version, *_ in held.values()})
    script.write_text("".join(f"{v} {{ local: stub_*; }};\n" for v in versions))
    run("gcc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}",
        str(source), "-o", str(directory / soname))  # fmt: skip
    return directory / soname


def main(directory):
    directory = Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent

    held = symbols(found("libc.so.6"), hidden=True)
    stubs = []
    for soname, pattern in MOVED.items():
        moved = {name: held.pop(name) for name in list(held) if re.fullmatch(pattern, name)}
        stubs.append(write_stub(directory, soname, moved))
    libc = write_stub(directory, "libc.so.6", held)
    libm = write_stub(directory, "libm.so.6", symbols(found("libm.so.6"), hidden=True))
    libm.rename(directory / "libm.so")
    gcc, cxx = (
        write_stub(directory, soname, symbols(found(soname), hidden=False))
        for soname in ("libgcc_s.so.1", "libstdc++.so.6")
    )

    run("gcc", "-c", "-O2", "-fPIC", "-fvisibility=hidden", str(here / "old_linux.c"), "-o",
        str(directory / "old_linux.o"))  # fmt: skip
    archive = directory / "libold_linux.a"
    archive.unlink(missing_ok=True)
    run("ar", "rcs", str(archive), str(directory / "old_linux.o"))

    late = " ".join(map(str, stubs))
    nonshared, loader = found("libc_nonshared.a"), found("ld-linux-x86-64.so.2")
    (directory / "libc.so").write_text(
        f"GROUP ( {libc} AS_NEEDED ( {late} {loader} ) {archive} {nonshared} )\n"
    )
    (directory / "libgcc_s.so").write_text(f"GROUP ( {gcc} {found('libgcc.a')} )\n")
    # What the stub lacks comes from the archive, as in Red Hat's newer compilers for old systems.
    (directory / "libstdc++.so").write_text(f"GROUP ( {cxx} {found('libstdc++.a')} )\n")


if __name__ == "__main__":
    main(sys.argv[1])
