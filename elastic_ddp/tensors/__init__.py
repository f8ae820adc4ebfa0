"""Trees of tensors and the host memory that holds them. Open `state_tree` first: it says what a state may contain."""
