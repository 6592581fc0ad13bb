"""State that is not on the device but in the host's memory, or on its disk, and how it is stepped there."""
