"""The ops by name."""

from trtkv.plugins import all_gather, all_reduce, kv_append, kv_attend, kv_select
from trtkv.plugins.face import OpFace

FACES: dict[str, OpFace] = {face.name: face for face in (kv_append.FACE, kv_select.FACE, kv_attend.FACE, all_reduce.FACE, all_gather.FACE)}
