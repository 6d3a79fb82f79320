"""AllGather: put side by side what every GPU of an engine has computed of the same rows."""

from plugins.collectives.all_gather.op import all_gather
from plugins.nodes.node import OpFace

# `parts` holds nothing: its length, a constant, says of how many GPUs.
FACE = OpFace(
    name="AllGather",
    inputs=("x", "parts"),
    optional=(),
    integer_output=False,
    shape=lambda inputs, config: (inputs[0][0], inputs[0][1] * inputs[1][0]),  # type: ignore[operator]
    torch=all_gather,
)
