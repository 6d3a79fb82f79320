"""KvAttend: exact attention over the pages, or over the tokens that KvSelect chose."""

from plugins.attend.op import attend
from plugins.nodes.node import OpFace

FACE = OpFace(
    name="KvAttend",
    inputs=("query", "cu_seqlens", "seq_lens", "stored_lens", "slots", "page_table", "state", "selection"),
    optional=("selection",),
    integer_output=False,
    shape=lambda inputs, config: (inputs[0][0], config.num_q_heads * config.head_dim),
    torch=attend,
    cuda="plugins.attend.cuda:attend",
)
