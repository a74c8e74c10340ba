"""What docs/models.md tells of each family, beside what the registry and the adapters say: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

TESTED_WITH = "5.24"
"""The release of transformers whose numbers the tests hold every family to."""


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """One line of the table. `families` are names of the registry's, alike in all that is told here.

    `rows` is how many rows of the token-level output an item has, `width` the values of each, as fields of
    `config.json` where they are there. `pooled` is the one vector of an item, "" where there is none. `cut` are the
    parts that tensor parallelism cuts, `whole` those that every rank holds whole beside embeddings and norms.
    `batch` is how items of one forward lie beside each other.
    """

    name: str
    families: tuple[str, ...]
    rows: str
    width: str
    pooled: str = ""
    cut: str = "layers"
    whole: str = ""
    batch: str


_PACKED = "packed without padding"
_STACKED = "one stack: all have one size"
_TILES = "one stack of all tiles"
_TEXT_WIDTH = "`text_config.hidden_size`"
_OF_FOUR = "one per 2 x 2 patches and pair of frames"
_NEWLINES = "those of the whole picture, then of its tiles without padding, with a newline after each line"
_SCALED = "one per `scale_factor`² patches of each tile, the whole picture last"
_PROMPT = "one per token of the prompt around the picture"
_MANY_VECTORS = "`embedding_dim` (128), of length 1"
_WINDOWS = "one stack of windows of 30 s"

CATALOGUE: tuple[FamilyFacts, ...] = (
    FamilyFacts(
        name="Qwen2-VL",
        families=("qwen2_vl",),
        rows=_OF_FOUR,
        width="`vision_config.hidden_size`",
        cut="layers, merger",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="Qwen2.5-VL",
        families=("qwen2_5_vl",),
        rows=_OF_FOUR,
        width="`vision_config.out_hidden_size`",
        cut="layers, merger",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="Qwen3-VL, dense and with experts",
        families=("qwen3_vl", "qwen3_vl_moe"),
        rows=_OF_FOUR,
        width="`out_hidden_size` * (1 + levels): the row, then each deepstack level's",
        cut="layers, merger, the levels' mergers",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="Qwen3.5, dense and with experts",
        families=("qwen3_5", "qwen3_5_moe"),
        rows=_OF_FOUR,
        width="`vision_config.out_hidden_size`",
        cut="layers, merger",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="Qwen2.5-Omni's thinker",
        families=("qwen2_5_omni",),
        rows=f"{_OF_FOUR}; of sounds one per 40 ms. A film's sound is an item of its own",
        width="`vision_config.out_hidden_size`, which is the sounds' too",
        cut="both towers' layers, merger",
        whole="the projection of sounds",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="Qwen3-Omni's thinker",
        families=("qwen3_omni_moe",),
        rows=f"{_OF_FOUR}; of sounds 13 per second. A film's sound is an item of its own",
        width="`out_hidden_size` * (1 + levels); of sounds `audio_config.output_dim`, without levels",
        cut="both towers' layers, merger, the levels' mergers",
        whole="convolutions and projection of sounds",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="GLM-4.1V, 4.5V, 4.6V",
        families=("glm4v", "glm4v_moe", "glm46v"),
        rows=_OF_FOUR,
        width="`vision_config.out_hidden_size`",
        cut="layers, the gated part of the merger",
        whole="the rest of the merger",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="LLaVA-1.5; Pixtral in its format",
        families=("llava",),
        rows="one per patch, and one for the class token where the checkpoint keeps it; no row breaks, which are text",
        width=_TEXT_WIDTH,
        cut="layers, projector",
        batch=f"{_STACKED}; with Pixtral's tower padded, and each attends to itself",
    ),
    FamilyFacts(
        name="LLaVA-NeXT",
        families=("llava_next",),
        rows=_NEWLINES,
        width=_TEXT_WIDTH,
        cut="layers, projector",
        batch=_TILES,
    ),
    FamilyFacts(
        name="LLaVA-NeXT-Video",
        families=("llava_next_video",),
        rows=f"{_NEWLINES}; of films one per 2 x 2 patches of a frame",
        width=_TEXT_WIDTH,
        cut="layers, projector",
        batch=_TILES,
    ),
    FamilyFacts(
        name="LLaVA-OneVision",
        families=("llava_onevision",),
        rows=f"{_NEWLINES}; large pictures' are scaled down; of films one per 2 x 2 patches, and a newline last",
        width=_TEXT_WIDTH,
        cut="layers, projector",
        batch=_TILES,
    ),
    FamilyFacts(
        name="InternVL, `-hf` checkpoints",
        families=("internvl",),
        rows="one per 2 x 2 patches of each tile, the whole picture last; a frame is one tile",
        width=_TEXT_WIDTH,
        cut="layers with the norms over all heads, projector",
        batch=_TILES,
    ),
    FamilyFacts(
        name="Mistral 3",
        families=("mistral3",),
        rows="one per 2 x 2 patches; no row breaks, which are text",
        width=_TEXT_WIDTH,
        cut="layers, projector",
        whole="the merger of patches",
        batch="padded; each attends to itself",
    ),
    FamilyFacts(
        name="Gemma 3",
        families=("gemma3",),
        rows="`mm_tokens_per_image`, and as many for each crop where pan and scan is on",
        width=_TEXT_WIDTH,
        whole="projector",
        batch=_TILES,
    ),
    FamilyFacts(
        name="PaliGemma, PaliGemma 2",
        families=("paligemma",),
        rows="one per patch",
        width=_TEXT_WIDTH,
        whole="projector",
        batch=_STACKED,
    ),
    FamilyFacts(
        name="Idefics3",
        families=("idefics3",),
        rows=_SCALED,
        width=_TEXT_WIDTH,
        whole="projector",
        batch=_TILES,
    ),
    FamilyFacts(
        name="SmolVLM",
        families=("smolvlm",),
        rows=f"{_SCALED}; a frame is one tile",
        width=_TEXT_WIDTH,
        whole="projector",
        batch=_TILES,
    ),
    FamilyFacts(
        name="MiniCPM-V 4.6, 4.7",
        families=("minicpmv4_6", "minicpmv4_7"),
        rows="one per 16 patches (of some checkpoints 4) of the whole picture, then of each slice",
        width=_TEXT_WIDTH,
        cut="layers, mergers",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="CLIP",
        families=("clip",),
        rows="one per patch, of the last layer before any norm",
        width="`vision_config.hidden_size`",
        pooled="`projection_dim`: `get_image_features`",
        whole="projection",
        batch=_STACKED,
    ),
    FamilyFacts(
        name="SigLIP; SigLIP 2 at a fixed resolution",
        families=("siglip",),
        rows="one per patch",
        width="`vision_config.hidden_size`",
        pooled="the same: `get_image_features`",
        whole="pooling head",
        batch=_STACKED,
    ),
    FamilyFacts(
        name="SigLIP 2 NaFlex",
        families=("siglip2",),
        rows="one per patch of the picture's own grid, `max_num_patches` at most",
        width="`vision_config.hidden_size`",
        pooled="the same: `get_image_features`",
        whole="pooling head",
        batch="padded and masked",
    ),
    FamilyFacts(
        name="DINOv2, without and with registers",
        families=("dinov2", "dinov2_with_registers"),
        rows="one per patch; none for registers",
        width="`hidden_size`",
        pooled="the same: the class token after the last norm",
        batch=_STACKED,
    ),
    FamilyFacts(
        name="DINOv3, vision transformers",
        families=("dinov3_vit",),
        rows="one per patch; none for registers",
        width="`hidden_size`",
        pooled="the same: the class token after the last norm",
        batch=_STACKED,
    ),
    FamilyFacts(
        name="DINOv3, convolutional",
        families=("dinov3_convnext",),
        rows="one per field of the last stage, of 32 x 32 pixels",
        width="`hidden_sizes`' last",
        pooled="the same: the mean of the fields after the last norm",
        cut="the two linear parts of each layer, which are nearly all of it",
        whole="convolutions",
        batch=_STACKED,
    ),
    FamilyFacts(
        name="ColPali, `-hf` checkpoints",
        families=("colpali",),
        rows=f"{_PROMPT}: one per patch, then its words",
        width=_MANY_VECTORS,
        cut="layers of tower and language model",
        whole="projections, keys and values of the language model",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="ColQwen2, `-hf` checkpoints",
        families=("colqwen2",),
        rows=f"{_PROMPT}: words, one per 2 x 2 patches, words",
        width=_MANY_VECTORS,
        cut="layers of tower and language model, merger",
        whole="projection, keys and values of the language model",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="ColModernVBert",
        families=("colmodernvbert",),
        rows=f"{_PROMPT}: for each tile, the whole picture last, words and one per `pixel_shuffle_factor`² patches",
        width=_MANY_VECTORS,
        cut="layers of tower and language model",
        whole="projections",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="Whisper",
        families=("whisper",),
        rows="one per 20 ms of a window of 30 s",
        width="`d_model`",
        batch=_WINDOWS,
    ),
    FamilyFacts(
        name="Qwen2-Audio",
        families=("qwen2_audio",),
        rows="one per 40 ms",
        width=_TEXT_WIDTH,
        whole="projector",
        batch=_WINDOWS,
    ),
    FamilyFacts(
        name="Qwen3-ASR",
        families=("qwen3_asr",),
        rows="13 per second; a sound of less than half a second counts as one",
        width=_TEXT_WIDTH,
        cut="layers, projector",
        whole="convolutions",
        batch=_PACKED,
    ),
    FamilyFacts(
        name="CLAP, with and without fusion",
        families=("clap",),
        rows="one per field of the last stage, by frequency, then by time; of sounds over 10 s the middle counts",
        width="`audio_config.hidden_size`",
        pooled="`projection_dim`: `get_audio_features`, of length 1",
        cut="layers of all stages, projection",
        whole="what joins fields between stages",
        batch="one stack of windows of 10 s",
    ),
    FamilyFacts(
        name="Voxtral",
        families=("voxtral",),
        rows="375 for each 30 s, with the silence that fills up the last",
        width=_TEXT_WIDTH,
        cut="layers, projector",
        batch=_WINDOWS,
    ),
    FamilyFacts(
        name="Audio Flamingo 3, Music Flamingo",
        families=("audioflamingo3", "musicflamingo"),
        rows="one per 40 ms, in windows of 30 s",
        width=_TEXT_WIDTH,
        cut="layers, projector",
        batch=_WINDOWS,
    ),
    FamilyFacts(
        name="GLM-ASR",
        families=("glmasr",),
        rows="one per 80 ms, in windows of 30 s",
        width=_TEXT_WIDTH,
        cut="layers, projector",
        batch=_WINDOWS,
    ),
)

FALLBACK = FamilyFacts(
    name="Any other model of transformers with `get_image_features`, `get_audio_features` or `get_video_features`",
    families=("fallback",),
    rows="what that method gives for the item",
    width="the same; levels of a deep stack beside each other",
    pooled="the only output where the method gives one vector per item",
    cut="nothing: `--tp-size 1`, or `--mm-encoder-tp-mode data`",
    whole="the parts that rows come of",
    batch="none: one after another",
)
"""Told apart: its model types are not listed."""
