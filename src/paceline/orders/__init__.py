"""Which bytes go first? One file a method."""
