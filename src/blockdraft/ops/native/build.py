"""Compiles the kernel into the folder of this file; also run when the package is installed.

`python -m blockdraft.ops.native.build` does it again, for instance after a compiler has been installed.  Uses the
standard library only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "kernel.so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512vl")
SECONDS = 300  # after which a compiler is given up


def build() -> str | None:
    """Compile the library; None: done.  Otherwise why not, in one line, and no library is left behind."""
    LIBRARY.unlink(missing_ok=True)
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return "no C++ compiler found (looked for $CXX, " + ", ".join(COMPILERS) + ")"
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        objects = []
        for name, source, flags in _units():
            objects.append(f"{folder}/{name}.o")
            failed = _run([*compiler.split(), *FLAGS, *flags, "-c", str(FOLDER / source), "-o", objects[-1]])
            if failed:
                return failed
        made = f"{folder}/{LIBRARY.name}"
        failed = _run([*compiler.split(), "-shared", "-o", made, *objects])
        if failed is None:
            os.replace(made, LIBRARY)
        return failed


def digest() -> str:
    """What a library is made from, this file included: one that says otherwise does not belong to the package."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in (".h", ".cpp", ".py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _units() -> list[tuple[str, str, tuple[str, ...]]]:
    units: list[tuple[str, str, tuple[str, ...]]] = [
        ("library", "library.cpp", ("-fvisibility=default", f'-DSOURCES="{digest()}"')),
        ("portable", "path.cpp", ("-DPATH=portable",)),
    ]
    if platform.machine() in ("x86_64", "AMD64"):
        units.append(("avx2", "path.cpp", ("-DPATH=avx2", *AVX2)))
        units.append(("avx512", "path.cpp", ("-DPATH=avx512", *AVX512)))
    return units


def _run(command: list[str]) -> str | None:
    """Why a command failed, in one line; None: it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return f"{command[0]} failed: {lines[0] if lines else done.returncode}"


if __name__ == "__main__":
    problem = build()
    sys.stdout.write("" if problem else f"compiled {LIBRARY}\n")
    sys.exit(f"error: {problem}" if problem else 0)
