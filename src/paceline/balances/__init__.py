"""How many samples does each worker take? One file a method."""
