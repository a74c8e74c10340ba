"""Stands in for Mooncake where it is not installed: this folder's parent goes to PYTHONPATH of a process."""
