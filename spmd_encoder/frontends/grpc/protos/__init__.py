"""The messages of both services: the .proto files, and what `make protos` makes of them."""
