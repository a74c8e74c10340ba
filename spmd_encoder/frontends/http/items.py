"""An item of a JSON body: a picture, a sound, a film with how to sample it, or the digest of what was sent before."""

from __future__ import annotations

import msgspec

from spmd_encoder.api.types import NO_OPTIONS, ItemOptions, Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import ItemLimits, SourceItem, parse_item, read_item
from spmd_encoder.frontends.digests import held_item
from spmd_encoder.frontends.sampling import DEFAULT_FPS, Fps, MaxFrames
from spmd_encoder.media.data_uri import parse_data_uri
from spmd_encoder.media.fetch import is_remote
from spmd_encoder.media.frames import pack

_ONE_OF = "an item has one of `image`, `audio` and `video`, or a `digest`"
_SAMPLING = "`fps` and `max_frames` say how a `video` is sampled"


class ItemBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`video` may be a list of pictures, the film's frames as the caller sampled them; `fps` is then their rate.

    `modality` says of what `digest` is; without it of a picture.
    """

    image: str | None = None
    audio: str | None = None
    video: str | list[str] | None = None
    fps: Fps | None = None
    max_frames: MaxFrames | None = None
    digest: str | None = None
    modality: Modality | None = None


def source_of(item: ItemBody, default: ItemOptions, limits: ItemLimits, name: str) -> SourceItem:
    """The item; its failure is a value, said of its `name`. `default` are the request's options. Not for an event
    loop."""
    if item.digest is not None:
        return _held(item, item.digest, default, name)
    if item.modality is not None:
        return EncoderError(ErrorCode.INVALID_REQUEST, "`modality` says of what a `digest` is", param=name)
    given = [(m, value) for m in Modality if (value := getattr(item, m.value)) is not None]
    if len(given) != 1:
        return EncoderError(ErrorCode.INVALID_REQUEST, _ONE_OF, param=name)
    (modality, value) = given[0]
    if modality is not Modality.VIDEO:
        if item.fps is not None or item.max_frames is not None:
            return EncoderError(ErrorCode.INVALID_REQUEST, _SAMPLING, param=name)
        return parse_item(modality, value, limits, name)
    if isinstance(value, list):
        return _frames(value, item, limits, name)
    options = ItemOptions(fps=item.fps or default.fps, max_frames=item.max_frames or default.max_frames)
    return parse_item(modality, value, limits, name, options)


def _held(item: ItemBody, digest: str, default: ItemOptions, name: str) -> SourceItem:
    if any(getattr(item, modality.value) is not None for modality in Modality):
        return EncoderError(ErrorCode.INVALID_REQUEST, _ONE_OF, param=name)
    modality = item.modality or Modality.IMAGE
    if modality is not Modality.VIDEO and (item.fps is not None or item.max_frames is not None):
        return EncoderError(ErrorCode.INVALID_REQUEST, _SAMPLING, param=name)
    options = NO_OPTIONS
    if modality is Modality.VIDEO:
        options = ItemOptions(fps=item.fps or default.fps, max_frames=item.max_frames or default.max_frames)
    try:
        return held_item(modality, digest, options)
    except EncoderError as error:
        return error.at(name)


def _frames(uris: list[str], item: ItemBody, limits: ItemLimits, name: str) -> SourceItem:
    if not uris or item.max_frames is not None:
        why = "a list of frames is encoded as it is, so it takes no `max_frames`" if uris else "the film has no frames"
        return EncoderError(ErrorCode.INVALID_REQUEST, why, param=name)
    files = []
    room = limits.max_bytes
    for number, uri in enumerate(uris):
        try:
            if is_remote(uri):
                raise EncoderError(ErrorCode.INVALID_REQUEST, "frames are sent as data URIs, and not fetched")
            files.append(parse_data_uri(uri, max_bytes=room).data)
        except EncoderError as error:
            return EncoderError(error.code, f"frame {number}: {error.message}", param=name)
        room -= len(files[-1])
    return read_item(Modality.VIDEO, pack(files, item.fps or DEFAULT_FPS), limits, name)
