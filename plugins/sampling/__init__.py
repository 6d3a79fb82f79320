"""The choice of next tokens from logits, on the device."""
