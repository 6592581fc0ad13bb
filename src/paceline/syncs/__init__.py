"""What do workers agree on, when, and with which others? One file a method."""
