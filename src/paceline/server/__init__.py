"""Parameter servers: processes beside the workers that hold the weights and step the optimizer.

`server.py` is what a server knows and does, without threads or connections; `requests.py` lets several workers wait at
one; `messages.py` is what they say to each other, over a lane of two. On a worker, `client.py` talks to all servers,
`ranges.py` knows which server holds which numbers, `connections.py` connects and `launch.py` starts the processes.
`python -m paceline.server` is the process.
"""
