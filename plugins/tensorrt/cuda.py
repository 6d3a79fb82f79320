"""The handful of CUDA driver calls that are needed before, or without, torch."""

from __future__ import annotations

import ctypes
from functools import cache

_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _COMPUTE_CAPABILITY_MAJOR and _MINOR


@cache
def _driver() -> ctypes.CDLL | None:
    """The initialized driver, None on a machine without a usable one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return library if library.cuInit(0) == 0 else None
    except (OSError, AttributeError):
        return None


def device_count() -> int:
    """Count the CUDA devices of this process; 0 without a driver."""
    driver, count = _driver(), ctypes.c_int(0)
    return count.value if driver is not None and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def compute_capability(device: int = 0) -> str | None:
    """Return the compute capability of a device as written on command lines, "89" or "120"; None without such a device."""
    major, minor = (_attribute(which, device) for which in (_MAJOR, _MINOR))
    return None if major is None or minor is None else f"{major}{minor}"


def describe(device: int = 0) -> str | None:
    """Name a GPU with its multiprocessors, of which a part of it (MIG) has fewer; None without such a device."""
    driver, handle, name = _driver(), ctypes.c_int(0), ctypes.create_string_buffer(256)
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), device) != 0 or driver.cuDeviceGetName(name, len(name), handle) != 0:
        return None
    return f"{name.value.decode(errors='replace')}, {_attribute(_MULTIPROCESSORS, device)} multiprocessors"


def _attribute(which: int, device: int) -> int | None:
    driver, handle, value = _driver(), ctypes.c_int(0), ctypes.c_int(0)
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), device) != 0:
        return None
    return value.value if driver.cuDeviceGetAttribute(ctypes.byref(value), which, handle) == 0 else None


def driver_version() -> str | None:
    """Return the CUDA version that the driver supports, such as "13.0"; None without a driver."""
    driver, version = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def zero_fill(pointer: int, size: int, stream: int) -> None:
    """Set size bytes of device memory to zero on a stream; safe inside a capture. Raises RuntimeError when the driver refuses.

    Without a driver the pointer can only be the host's (see `tensors.wrap`).
    """
    if size == 0:
        return
    driver = _driver()
    if driver is None:
        ctypes.memset(pointer, 0, size)
        return
    code = driver.cuMemsetD8Async(ctypes.c_uint64(pointer), ctypes.c_ubyte(0), ctypes.c_size_t(size), ctypes.c_void_p(stream))
    if code != 0:
        raise RuntimeError(f"cuMemsetD8Async of {size} bytes failed with code {code}")
