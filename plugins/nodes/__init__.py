"""The plugin nodes of a graph: what the graph, the executors and TensorRT know of them."""
