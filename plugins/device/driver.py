"""The CUDA driver: loads a compiled kernel and launches it.

A launch makes no allocation and no synchronization, so it can be captured; loading must come before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from plugins.device.spec import Binary, Pointer, Spec
from trtkv.errors import CapacityError, EngineError

# Of an SM's memory stays shared memory under kernels that request cache: some blocks of the next kernel fit beside theirs; and under small ones that
# follow each other in a step: then those of any other do.
CACHING_PERCENT, BESIDE_PERCENT = 10, 75
MOST_CONFIGS = 256  # of a kernel that are cached; prompts' chunks have ever new shapes


class Refused(EngineError):
    """The driver does not take a compiled kernel: it is damaged, or made for another GPU or by a newer CUDA."""


class Kernel:
    """A loaded function with the C types of its arguments; threads is how many a block has where the compiler decided that, else 0."""

    def __init__(self, spec: Spec, binary: Binary) -> None:
        """Load it on the current device, with as much dynamic shared memory as the spec requests and the device has, and clusters of sixteen.

        Raises Refused where the driver does not take the cubin.
        """
        from cuda.bindings import driver

        self._driver = driver
        self._configs: dict[tuple[Any, ...], Any] = {}
        scratch = binary.facts.get("scratch", 0)
        self._types, self._nulls = spec.types + (Pointer,) * scratch, (0,) * scratch
        self.threads, self.shared = binary.facts.get("threads", 0), binary.facts.get("shared", spec.shared)
        self._module = self._load(spec, lambda: driver.cuModuleLoadData(binary.cubin))
        self._function = self._load(spec, lambda: driver.cuModuleGetFunction(self._module, spec.entry.encode()))
        attribute, device = driver.CUdevice_attribute, _value(driver.cuCtxGetDevice())
        self._major = _value(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        most = _value(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device))
        settings = driver.CUfunction_attribute
        most -= _value(driver.cuFuncGetAttribute(settings.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self._function))
        size = settings.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(self._function, size, min(self.shared, most))[0])
        if spec.shared_percent >= 0:
            self.prefer_shared(spec.shared_percent)
        if self._major >= 9:  # where sixteen are beyond the device, smaller clusters still are not
            driver.cuFuncSetAttribute(self._function, settings.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)

    def prefer_shared(self, percent: int) -> None:
        """Say how much of a multiprocessor's memory is shared memory under its launches, in percent; the rest caches. -1 leaves it to the driver.

        Left to the driver, a kernel that begins while another one ends runs with what that one needed.
        """
        setting = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _check(self._driver.cuFuncSetAttribute(self._function, setting, percent)[0])

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, stream: int, values: Sequence[Any], *, cluster: int = 1, overlap: bool = False,
        cooperative: bool = False,
    ) -> None:  # fmt: skip
        """Launch on a stream; overlap lets the kernel start while the one before it drains (it waits itself before it reads; from sm_90 on).

        Blocks of a cooperative launch may wait for each other: all of them are resident at once, or the driver refuses the launch.
        """
        shape = (grid, threads, shared, stream, cluster, overlap, cooperative)
        config = self._configs.get(shape)
        if config is None:
            if len(self._configs) >= MOST_CONFIGS:
                self._configs.clear()
            config = self._configs[shape] = self._configure(*shape)
        _check(self._driver.cuLaunchKernelEx(config, self._function, ((*values, *self._nulls), self._types), 0)[0])

    def _configure(
        self, grid: tuple[int, int, int], threads: int, shared: int, stream: int, cluster: int, overlap: bool, cooperative: bool
    ) -> Any:  # fmt: skip
        """Make what a launch takes; that costs more than the launch itself, so it is cached."""
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
        if cooperative:
            one = driver.CUlaunchAttribute()
            one.id, one.value.cooperative = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1
            attributes.append(one)
        if overlap and self._major >= 9:
            one = driver.CUlaunchAttribute()
            one.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            one.value.programmaticStreamSerializationAllowed = 1
            attributes.append(one)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _load(self, spec: Spec, call: Any) -> Any:
        answer = call()
        if answer[0] == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise CapacityError(f"the GPU has no memory left for the kernel {spec.title}", "Lower --cache-bytes, or free memory on the GPU.")
        if int(answer[0]) != 0:
            code = getattr(answer[0], "name", answer[0])
            raise Refused(f"the driver refuses the compiled kernel {spec.title} for sm_{spec.arch} ({code})", "Check the driver with trtkv doctor.")
        return answer[1]


def arch() -> str:
    """Name the current device's compute capability, such as "90", with the specific features of sm_90 and later left out."""
    import torch

    return _arch(torch.cuda.current_device())


@cache
def cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA that the driver runs, None where there is no driver."""
    try:
        from cuda.bindings import driver

        code, number = driver.cuDriverGetVersion()
    except (ImportError, OSError, RuntimeError):
        return None
    return (number // 1000, number % 1000 // 10) if int(code) == 0 and number else None


@cache
def _arch(device: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}"


def _check(code: Any) -> None:
    if int(code) != 0:
        raise EngineError(f"the CUDA driver answered {code!r}", "Check the driver with trtkv doctor.")


def _value(answer: tuple[Any, ...]) -> Any:
    _check(answer[0])
    return answer[1]
