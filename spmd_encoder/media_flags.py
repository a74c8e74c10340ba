"""How media are fetched, read and decoded: the flags."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_encoder.flags import ZERO, flag


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    alpha: str = flag(
        "white",
        "what transparent parts of a picture are laid on; drop leaves the alpha channel out, as Pillow's "
        "convert and SGLang do",
        choices=("white", "black", "drop"),
    )
    allow_private_media_hosts: bool = flag(
        False,
        "fetch from private, loopback, link-local and other non-public addresses too; without it, whoever may send "
        "requests could read the server's own network and its cloud's metadata",
    )
    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "exact host names that media are fetched from, redirects included, separated by commas or spaces; "
        "empty allows every public host",
    )
    allowed_local_media_path: str | None = flag(
        None,
        "folder whose files may be named as file:///absolute/path; symbolic links must stay inside it; without it "
        "file:// is refused",
    )
    media_url_max_file_size_mb: int = flag(
        64, "largest file behind a URL, in MiB, held to while it arrives; 0 leaves only the other limits", least=ZERO
    )
    media_fetch_timeout_s: float = flag(
        10.0, "longest fetch of one URL, with its wait for a free connection, its redirects and the whole download"
    )
    max_audio_seconds: float = flag(1800.0, "longest sound, told while it is decoded")
    max_video_seconds: float = flag(7200.0, "longest film, by its header and by the times of its frames")
    max_video_frames: int = flag(768, "most frames of one film that are encoded; a request may ask for fewer")
    max_video_frames_decoded: int = flag(20_000, "most frames of one film that are decoded to get at those")
    max_video_bytes_decoded: int = flag(2**30, "most bytes of one film's frames, decoded, that are held for encoding")
