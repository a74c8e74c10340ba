"""A process with memory that others write into: `python memory_process.py NUM_BYTES`, with Mooncake on its path.

Says `SESSION ADDRESS` on a line of its output that begins with `memory`. For each line of its input that names a file
it writes its memory there, and says `saved`.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path


def main() -> None:
    num_bytes = int(sys.argv[1])
    memory = (ctypes.c_char * num_bytes)()
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(ctypes.addressof(memory), num_bytes) == 0
    print(f"memory 127.0.0.1:{engine.get_rpc_port()} {ctypes.addressof(memory)}", flush=True)
    for line in sys.stdin:
        Path(line.strip()).write_bytes(memory.raw)
        print("saved", flush=True)


if __name__ == "__main__":
    main()
