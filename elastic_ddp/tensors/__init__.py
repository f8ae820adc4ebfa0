"""Trees of tensors, and the memory that holds them."""
