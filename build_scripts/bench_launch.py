"""What an eager launch costs the host: by `plugins.device` and by cuda.core, of the same kernel with eight pointers and six numbers.

    python build_scripts/bench_launch.py [--launches N]

In a captured graph both are the same node. Needs a GPU, `trtkv[gpu]` and cuda-core.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from plugins.device import driver, kernel, store
from plugins.device.kernel import CudaKernel
from plugins.device.spec import Float, Int, Long, Pointer

SOURCE = """extern "C" __global__ void nothing(void* a, void* b, void* c, void* d, void* e, void* f, void* g, void* h,
                                     int i, int j, int k, long long l, int m, float n) {}"""
NUMBERS = (1, 2, 3, 4, 5, 6.0)


def ours(folder: Path, tensors: list[torch.Tensor]) -> dict[str, Callable[[], None]]:
    """Return launches as the product makes them: of tensors, and of a loaded kernel with addresses."""
    source = folder / "nothing.cu"
    source.write_text(SOURCE)
    declared = CudaKernel(source, "nothing", (Pointer,) * 8 + (Int, Int, Int, Long, Int, Float))
    loaded, stream = store.load(declared.variant(driver.arch())), torch.cuda.current_stream().cuda_stream
    values = (*(one.data_ptr() for one in tensors), *NUMBERS)
    return {
        "plugins.device.kernel, tensors": lambda: kernel.launch(declared.variant(driver.arch()), (1, 1, 1), (*tensors, *NUMBERS), threads=32),
        "plugins.device.driver, addresses": lambda: loaded.launch((1, 1, 1), 32, 0, stream, values),
    }


def by_cuda_core(tensors: list[torch.Tensor]) -> dict[str, Callable[[], None]]:
    """Return the launch by cuda.core with addresses; configuration, stream and numbers are made once."""
    import numpy as np

    try:
        from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
    except ImportError:  # before 1.0
        from cuda.core.experimental import Device, LaunchConfig, Program, ProgramOptions, launch
    device = Device(torch.cuda.current_device())
    device.set_current()
    function = Program(SOURCE, "c++", ProgramOptions(std="c++17", arch=f"sm_{device.arch}")).compile("cubin").get_kernel("nothing")
    config, stream = LaunchConfig(grid=1, block=32), device.create_stream()
    kinds = (np.int32, np.int32, np.int32, np.int64, np.int32, np.float32)
    values = (*(one.data_ptr() for one in tensors), *(kind(one) for kind, one in zip(kinds, NUMBERS, strict=True)))
    return {"cuda.core, addresses": lambda: launch(stream, config, function, *values)}


def cost(call: Callable[[], None], launches: int) -> list[float]:
    """Return the microseconds of a launch on the host, of seven runs."""
    runs = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(launches):
            call()
        runs.append((time.perf_counter() - begin) / launches * 1e6)
        torch.cuda.synchronize()
    return sorted(runs[1:])


def main() -> None:
    """Measure both, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=500, help="of a run; fewer than the queue of the driver holds")
    options = parser.parse_args()
    tensors = [torch.zeros(16, device="cuda") for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        ways = ours(Path(folder), tensors) | by_cuda_core(tensors)
        print(torch.cuda.get_device_name())
        for name, call in [*ways.items(), *ways.items()]:
            runs = cost(call, options.launches)
            print(f"{name:32} {median(runs):6.2f} us a launch ({runs[0]:.2f} to {runs[-1]:.2f})")


if __name__ == "__main__":
    main()
