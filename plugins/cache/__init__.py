"""The KV cache of a running engine, assembled from encoding, eviction, tier and index."""
