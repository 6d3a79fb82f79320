"""KvSelect: choose the tokens or pages that each head reads in this decode step."""

from plugins.nodes.node import OpFace
from plugins.select.op import select

FACE = OpFace(
    name="KvSelect",
    inputs=("query", "cu_seqlens", "seq_lens", "stored_lens", "slots", "page_table", "state"),
    optional=(),
    integer_output=True,
    shape=lambda inputs, config: (inputs[2][0], config.select_heads, config.select_width + 1),
    torch=select,
    cuda="plugins.select.cuda:select",
)
