"""Where state lives that is not on the device: host memory, and disk."""
