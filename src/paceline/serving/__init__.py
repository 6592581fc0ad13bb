"""Parameter servers: processes beside the workers that hold the weights and step the optimizer.

`server.py` is what a server knows and does, without clock, thread or wire; `comm.py` the wire between a worker and a
server; `python -m paceline.serving` the process.
"""
