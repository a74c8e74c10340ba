"""A multimodal encoder server that runs as one torch.distributed SPMD program."""

__version__ = "0.1.0"
