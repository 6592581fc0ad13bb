"""Where the optimizer's state lives, if not on the device: in the host's memory, or on its disk."""
