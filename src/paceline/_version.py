"""The version, for whoever writes it down: importing it imports nothing else."""

__version__ = "0.1.0"
