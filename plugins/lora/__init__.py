"""What LoRA adapters add to products, for tokens of several adapters in one step."""
