"""How published checkpoints quantize linear layers: one file a format, all described by one kind of plain data."""
