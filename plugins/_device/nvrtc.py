"""CUDA C++ kernels: compiled once for a set of definitions (NVRTC), kept as cubin files, launched on a stream of the caller.

A launch makes no allocation and no synchronization, so it can be captured; `load` compiles and must run before.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trtkv.checkpoint.find import data_home
from trtkv.errors import BuildError, EngineError

Int, Long, Float, Pointer = ctypes.c_int, ctypes.c_longlong, ctypes.c_float, ctypes.c_void_p


def cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    return data_home() / "kernels"


def cubin_name(source: str, defines: Sequence[str], arch: str) -> str:
    """Name a compiled kernel by what it was made from."""
    return hashlib.sha256("\n".join([source, *defines, arch]).encode()).hexdigest()[:24] + ".cubin"


def compile_source(source: str, defines: Sequence[str], arch: str) -> bytes:
    """Compile to a cubin for sm_{arch}; raises BuildError with the compiler's log."""
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture=sm_{arch}", "-std=c++17", *defines, *(f"-I{folder}" for folder in _include_folders())]
    code, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    _check(code)
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(code) != 0:
        log = b" " * _value(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        text = " ".join(log.decode(errors="replace").split())[:400]
        raise BuildError(f"a kernel did not compile for sm_{arch}: {text}", "Report this with the output of trtkv doctor.")
    cubin = b" " * _value(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, cubin)[0])
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def cubin_for(path: Path, defines: Sequence[str], arch: str) -> bytes:
    """Return the compiled kernel from the cache folder, compiling what is not there."""
    source = path.read_text()
    file = cache_folder() / cubin_name(source, defines, arch)
    if file.exists():
        return file.read_bytes()
    cubin = compile_source(source, defines, arch)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as draft:
        draft.write(cubin)
    Path(draft.name).replace(file)
    return cubin


class Kernel:
    """A loaded function with the C types of its arguments."""

    def __init__(self, cubin: bytes, name: str, types: Sequence[Any], shared: int) -> None:
        """Load a function of a cubin and allow it `shared` bytes of dynamic shared memory and clusters of sixteen."""
        from cuda.bindings import driver

        self._driver, self._types = driver, tuple(types)
        self._module = _value(driver.cuModuleLoadData(cubin))
        self._function = _value(driver.cuModuleGetFunction(self._module, name.encode()))
        attribute = driver.CUfunction_attribute
        _check(driver.cuFuncSetAttribute(self._function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)[0])
        _check(driver.cuFuncSetAttribute(self._function, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)[0])

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, stream: int, values: Sequence[Any], *, cluster: int = 1, overlap: bool = False
    ) -> None:
        """Launch on a stream; overlap lets the kernel start while the one before it drains (it waits itself before it reads)."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, stream
        attributes = []
        if cluster > 1:
            one = driver.CUlaunchAttribute()
            one.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            one.value.clusterDim.x, one.value.clusterDim.y, one.value.clusterDim.z = cluster, 1, 1
            attributes.append(one)
        if overlap:
            one = driver.CUlaunchAttribute()
            one.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            one.value.programmaticStreamSerializationAllowed = 1
            attributes.append(one)
        config.attrs, config.numAttrs = attributes, len(attributes)
        _check(driver.cuLaunchKernelEx(config, self._function, (tuple(values), self._types), 0)[0])


@cache
def load(path: Path, name: str, types: tuple[Any, ...], defines: tuple[str, ...], arch: str, shared: int) -> Kernel:
    """Return the kernel `name` of a source file, compiled and loaded once."""
    return Kernel(cubin_for(path, defines, arch), name, types, shared)


def _include_folders() -> Iterator[Path]:
    roots = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    roots += [Path("/usr/local/cuda/include")]
    roots += [found for entry in sys.path if entry for found in Path(entry).glob("nvidia/*/include")]
    return (root for root in roots if (root / "cuda_fp16.h").exists())


def _check(code: Any) -> None:
    if int(code) != 0:
        raise EngineError(f"the CUDA driver answered {code!r}", "Check the driver with trtkv doctor.")


def _value(answer: tuple[Any, ...]) -> Any:
    _check(answer[0])
    return answer[1]
