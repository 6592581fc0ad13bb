"""How is the mean of one vector over the workers estimated with few bytes? One file a method."""
