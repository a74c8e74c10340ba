"""The nursery's socket in the run folder."""

SOCKET_NAME = "nursery"
