"""KvAppend: normalize and rotate the new queries and keys, write keys and values into their pages, keep the summaries current."""

from plugins.append.op import append
from plugins.nodes.node import OpFace

FACE = OpFace(
    name="KvAppend",
    inputs=("qkv", "positions", "cu_seqlens", "seq_lens", "stored_lens", "slots", "page_table", "rope", "state", "q_norm", "k_norm"),
    optional=("q_norm", "k_norm"),
    integer_output=False,
    shape=lambda inputs, config: (inputs[0][0], config.num_q_heads * config.head_dim),
    torch=append,
    cuda="plugins.append.cuda:append",
)
