"""Runs a kernel of CUDA C++ on the CPU: the source as it is, the functions that are single instructions replaced by those of `cuda_host.h`."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
INSTRUCTIONS = (
    "exp2_fast", "dependency_wait", "shared_at", "copy16", "copies_commit", "copies_wait", "mma", "read4", "read4_transposed", "transpose8",
)  # fmt: skip


def host_source(kernel: Path) -> str:
    """Return the source with its own headers in it and without what only a GPU has."""
    text = re.sub(r'#include "([^"]+)"', lambda found: (kernel.parent / found[1]).read_text(encoding="utf-8"), kernel.read_text(encoding="utf-8"))
    text = re.sub(r"#include <cuda[^>]*>|#pragma once|typedef unsigned \w+ u\d+;|extern __shared__[^;]*;", "", text)
    for name in INSTRUCTIONS:
        text, count = re.subn(rf"^(?:template <int LEFT> )?__device__ __forceinline__ \w+ {name}\(.*?(?:\}}\n|^\}}\n)", "", text, flags=re.M | re.S)
        assert count == 1, f"{name} is defined {count} times"
    return text


def compile_kernel(kernel: Path, entry: str, types: Sequence[Any], defines: Sequence[str], folder: Path) -> Any:
    """Compile a kernel to a library: `run` takes its arguments, then grid x, y, z and the threads of a block; `backwards` turns their order round."""
    assert COMPILER is not None
    found = re.search(rf"__global__ void __launch_bounds__\([^{{]*?\) {entry}\((.*?)\) {{", kernel.read_text(encoding="utf-8"), re.S)
    assert found is not None, f"{kernel.name} has no {entry}"
    parameters = found[1]
    names = [one.split()[-1].lstrip("*") for one in parameters.split(",")]
    caller = (
        f'extern "C" void run({parameters}, int x, int y, int z, int threads) {{\n'
        f"  run_grid({{x, y, z}}, threads, [=] {{ {entry}({', '.join(names)}); }});\n}}\n"
    )
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(f'#include "cuda_host.h"\n{host_source(kernel)}\n{caller}', encoding="utf-8")
    words = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{HERE}", *defines, "-o", str(library), str(source)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = ctypes.CDLL(str(library))
    loaded.run.argtypes, loaded.run.restype = [*types, *([ctypes.c_int] * 4)], None
    return loaded
