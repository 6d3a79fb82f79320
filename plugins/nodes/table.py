"""The ops by name."""

from plugins import append as kv_append
from plugins import attend as kv_attend
from plugins import select as kv_select
from plugins.collectives import all_gather, all_reduce
from plugins.nodes.node import OpFace

FACES: dict[str, OpFace] = {face.name: face for face in (kv_append.FACE, kv_select.FACE, kv_attend.FACE, all_reduce.FACE, all_gather.FACE)}
