"""A worker of NVIDIA Dynamo: an engine behind its frontend, with page events for its KV-aware router."""
