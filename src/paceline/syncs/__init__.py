"""What is agreed on, when, with whom? One file a method."""
