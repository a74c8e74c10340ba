"""The nursery's socket in the run folder, and the question whether it lives."""

SOCKET_NAME = "nursery"
PING, PONG = b"ping", b"pong\n"
