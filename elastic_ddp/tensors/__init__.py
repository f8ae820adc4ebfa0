"""Trees of tensors and the host memory that holds them. Open `state_tree` first: it lists the types in a state."""
