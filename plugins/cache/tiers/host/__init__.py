"""Pages in host memory and their recall into device frames (FreeKV, arXiv 2505.13109): no node of the graph, but part of KvAppend and KvAttend."""
