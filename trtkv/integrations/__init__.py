"""Other products' front ends onto trtkv's engines."""
