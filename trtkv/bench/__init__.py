"""Measurements of this machine: times, bytes and how far both are from what the memory allows."""
