"""KvSelect: choose the tokens or pages that each head reads in this decode step."""

from trtkv.plugins.face import OpFace
from trtkv.plugins.kv_select.op import select

FACE = OpFace(
    name="KvSelect",
    inputs=("query", "cu_seqlens", "seq_lens", "stored_lens", "slots", "page_table", "state"),
    optional=(),
    integer_output=True,
    shape=lambda inputs, config: (inputs[2][0], config.select_heads, config.select_width + 1),
    torch=select,
    cuda="trtkv.plugins.kv_select.cuda:select",
)
