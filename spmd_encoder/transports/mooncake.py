"""SGLang's mooncake backend: rows are written into memory that the receiver has named, and a message says when."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.base import Parcel, RemoteMemory
from spmd_encoder.transports.memory_writer import MemoryWriter, WriteError
from spmd_encoder.transports.zmq_push import ZmqPush


class MemoryPush:
    """A `Transport` to `RemoteMemory`. Belongs to one event loop. `timeout_s` bounds each delivery."""

    def __init__(self, writer: MemoryWriter, push: ZmqPush[Parcel], *, timeout_s: float) -> None:
        self.writer = writer
        self._push = push
        self._timeout_s = timeout_s

    async def deliver(self, parcel: Parcel, destination: RemoteMemory) -> None:
        """See `Transport.deliver`. When it raises, the rows are on their way no more. Raises `EncoderError`
        DELIVERY_FAILED."""
        for place in (destination.endpoint, destination.session):
            if not self._push.allows(place):
                raise _failed(destination, f"{place.host} is none of --push-allowed-hosts")
        session = str(destination.session)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.writer.write(parcel.chunks, parcel.num_bytes, session, destination.address)
                await self._push.deliver(replace(parcel, chunks=()), destination.endpoint)
        except TimeoutError:
            raise _failed(destination, f"it was not done within {self._timeout_s:g} s") from None
        except WriteError as error:
            raise _failed(destination, str(error)) from None

    async def close(self) -> None:
        """See `Transport.close`."""
        await self.writer.close()
        await self._push.close()


def _failed(destination: RemoteMemory, why: str) -> EncoderError:
    return EncoderError(ErrorCode.DELIVERY_FAILED, f"the embeddings cannot be written into {destination}: {why}")
