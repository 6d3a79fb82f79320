from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toy_graph import build, graph, needs_rtx
from trtkv.engine.launched_kernels import Kernel, kernels, segments

PLUGINS = [f"{name}.{layer}" for layer in range(4) for name in ("query", "selection", "attended")]


@pytest.fixture(scope="module")
def plan() -> bytes:
    return bytes(build(graph(4)).data)


@pytest.mark.trt
@needs_rtx
def test_four_layers_of_three_plugins_stay_one_graph(plan: bytes) -> None:
    assert segments(plan) == 1
    for profile in (0, 1):
        found = [kernel.layers for kernel in kernels(plan) if kernel.kind == "custom_layer" and kernel.profile == profile]
        assert found == [(name,) for name in PLUGINS]


@pytest.mark.trt
@needs_rtx
def test_residual_is_fused_into_its_gemm(plan: bytes) -> None:
    decode = [kernel for kernel in kernels(plan) if kernel.profile == 0]
    fused = [kernel for kernel in decode if "residual.0" in kernel.layers]
    assert [kernel.layers for kernel in fused] == [("projected.0", "residual.0")]
    assert fused[0].kind == "runtime_fusion"
    assert len(decode) == 4 * (1 + 3 + 1)  # packed Gemm, three plugins, Gemm with residual; the last takes the Cast along


@pytest.mark.trt
@needs_rtx
def test_every_node_is_in_exactly_one_kernel(plan: bytes) -> None:
    covered = [layer for kernel in kernels(memoryview(plan)) if kernel.profile == 1 for layer in kernel.layers]
    expected = [f"{name}.{layer}" for layer in range(4) for name in ("packed", "query", "selection", "attended", "projected", "residual")]
    assert sorted(covered) == sorted([*expected, "logits"])


def test_text_of_two_segments_and_a_fusions_inside() -> None:
    def program(first: str, body: str, region: str = "consts") -> bytes:
        return (
            f'header {{\n  version = 5\n  region = {{ name={region} }}\n  inputs={{ "{first}" }}\n}}\nmain {{\n label bb1: \n{body}}}\n'.encode()
            + b"\0\1\2"
        )

    call = '  {kind}={{ name={name} stream=0 layers="{layers}" }}\n'
    one = program("x.1", call.format(kind="custom_layer", name='"q_U2"', layers="[ONNX Layer: q]"))
    inside = program("x.1", call.format(kind="add", name='"r_U1"', layers="[ONNX Layer: r]"), "runtime-fusion-consts")
    two = program("y.1", call.format(kind="runtime_fusion", name="__myl_FcAdd", layers="[ONNX Layer: p]\x1e[ONNX Layer: r]"))
    other = program("x [profile 1].1", call.format(kind="custom_layer", name='"q [profile 1]_U2"', layers="[ONNX Layer: q]"))
    assert kernels(b"ftrt\0" + one + inside + two + other) == [
        Kernel("custom_layer", "q", ("q",), 0, 0),
        Kernel("runtime_fusion", "__myl_FcAdd", ("p", "r"), 0, 1),
        Kernel("custom_layer", "q", ("q",), 1, 0),
    ]
    assert segments(one + inside + two + other) == 2


@given(st.binary(max_size=200), st.sampled_from([b"", b"header {\n  version", b"main {\n", b"  inputs={ x }\n"]))
def test_what_is_not_understood_gives_nothing(noise: bytes, hint: bytes) -> None:
    assert kernels(hint + noise) == []
    assert segments(noise + hint) == 0
