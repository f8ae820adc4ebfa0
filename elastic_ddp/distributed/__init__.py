"""What the ranks of one generation do together: the process group, reduction, control and hand-over of state."""
