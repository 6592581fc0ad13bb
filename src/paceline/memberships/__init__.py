"""Which workers are in the group, and does this step count? One file a method."""
