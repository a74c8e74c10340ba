"""Films of models without a family, by transformers' video processors, which need torchvision."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from spmd_encoder.api.types import ItemOptions, MediaItem, Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.base import Features, LoadContext, TowerOutput
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.fallback import FallbackAdapter
from spmd_encoder.models.loading import load_adapter
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.vision_language import TINY_LLAMA
from tests.harness import media
from tests.harness.clips import film, only
from tests.harness.fallback_families import gemma4_config, video_llama_3_config
from tests.harness.world import World, data_uri, noise_png, off_by, vector

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="`make torchvision` runs this with torchvision"
)

models: Any = transformers
REPOSITORY = Path(__file__).parents[2]
SIZES = ((8, 112, 112), (40, 320, 240), (5, 61, 90), (1, 64, 48), (3, 640, 480), (17, 20, 300), (70, 1, 1))
"""(frames, width, height) of films."""


@dataclass(frozen=True, kw_only=True)
class FilmModel:
    """`says` is the checkpoint's file for films; `taken` how many frames of a film of 100 in 4 s that comes to."""

    name: str
    cls: str
    config: Callable[[], Any]
    processor: str
    says: dict[str, Any]
    taken: int
    pictures: Callable[[], Any] | None = None

    def write(self, folder: Path) -> None:
        made = getattr(models, self.processor)(**self.says)
        write_random(getattr(models, self.cls), self.config(), made, folder, seed=5)
        if self.pictures is not None:
            self.pictures().save_pretrained(folder)


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


_CLIP = {**TINY_VISION, "model_type": "clip_vision_model", "image_size": 112, "patch_size": 14}
MODELS = (
    FilmModel(
        name="video_llama_3",
        cls="VideoLlama3ForConditionalGeneration",
        config=video_llama_3_config,
        processor="VideoLlama3VideoProcessor",
        says={"fps": 2, "max_frames": 20, "size": {"shortest_edge": 56 * 56, "longest_edge": 20 * 112 * 112}},
        taken=8,
        pictures=lambda: models.VideoLlama3ImageProcessorPil(patch_size=14, merge_size=2),
    ),
    FilmModel(
        name="video_llava",
        cls="VideoLlavaForConditionalGeneration",
        config=lambda: models.VideoLlavaConfig(
            vision_config=_CLIP, text_config=TINY_LLAMA, image_token_index=60, video_token_index=61
        ),
        processor="VideoLlavaVideoProcessor",
        says={"size": {"shortest_edge": 112}, "crop_size": _square(112)},
        taken=32,
        pictures=lambda: models.VideoLlavaImageProcessor(size={"shortest_edge": 112}, crop_size=_square(112)),
    ),
    FilmModel(
        name="gemma4",
        cls="Gemma4ForConditionalGeneration",
        config=lambda: gemma4_config(audio_config=None),
        processor="Gemma4VideoProcessor",
        says={"patch_size": 8, "max_soft_tokens": 70, "num_frames": 6},
        taken=6,
    ),
    FilmModel(
        name="videoprism",
        cls="VideoPrismClipModel",
        config=lambda: models.VideoPrismConfig(
            vision_config={"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 36,
                           "num_spatial_layers": 1, "num_temporal_layers": 1, "num_auxiliary_layers": 1,
                           "num_frames": 4, "tubelet_size": [1, 18, 18]},
            text_config={"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 64,
                         "num_hidden_layers": 1, "vocab_size": 64},
        ),
        processor="LlavaOnevisionVideoProcessor",
        says={"size": _square(36), "do_normalize": False},
        taken=4,
    ),
)  # fmt: skip


class Case:
    """One checkpoint, loaded by the fallback and, whole, by transformers."""

    def __init__(self, one: FilmModel, folder: Path, context: LoadContext) -> None:
        one.write(folder)
        self.one, self.folder = one, folder
        adapter = load_adapter(folder, context)
        assert isinstance(adapter, FallbackAdapter)
        self.adapter = adapter
        self.whole = getattr(models, one.cls).from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = models.AutoVideoProcessor.from_pretrained(folder)

    def chosen(self, item: Film, options: ItemOptions | None = None) -> Film:
        return only(item, self.adapter.preprocessor.choose_frames(item.info, options or ItemOptions()))

    def features(self, item: Film) -> Features:
        return self.adapter.preprocessor.preprocess_video(item)

    def run(self, items: list[Features]) -> list[TowerOutput]:
        with torch.inference_mode():
            return self.adapter.forward(self.adapter.pack(items))

    def rows(self, frames: np.ndarray[Any, Any], **options: Any) -> Tensor:
        """transformers' own of `[frames, height, width, 3]`, as its processor takes them by itself."""
        made = self.processor(videos=[frames], return_tensors="pt", input_data_format="channels_last", **options)
        names = ("pixel_values_videos", "video_grid_thw", "video_merge_sizes", "video_position_ids")
        inputs = {name: made[name] for name in (*names, "num_frames_per_video") if name in made}
        with torch.inference_mode():
            model = getattr(self.whole, "model", self.whole)
            found = model.get_video_features(**inputs).pooler_output
        pieces = found if isinstance(found, list | tuple) else [found]
        return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])

    def rows_of(self, item: Film) -> Tensor:
        """Of all the film's frames; a model that is made for a number of them gets that number."""
        frames = np.stack(item.frames)
        if self.one.name == "videoprism":
            frames = frames[np.arange(4) * len(frames) // 4]
        return self.rows(frames, do_sample_frames=False)


@pytest.fixture(scope="module", params=MODELS, ids=lambda one: one.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, context: LoadContext) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param.name), context)


def close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= 1e-5 * want.abs().max())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_film_equals_transformers_and_has_the_rows_that_were_promised(case: Case, sizes: tuple[int, ...]) -> None:
    item = case.chosen(film(*sizes))
    features = case.features(item)
    (out,) = case.run([features])
    want = case.rows_of(item)
    assert close(out.tokens, want)
    assert features.num_tokens == len(want)
    assert features.details["num_frames"] == len(item.frames)


def test_a_batch_equals_its_items(case: Case) -> None:
    items = [case.features(case.chosen(film(*sizes))) for sizes in SIZES[:4]]
    together = case.run(items)
    for features, out in zip(items, together, strict=True):
        assert torch.equal(out.tokens, case.run([features])[0].tokens)


def test_frames_are_those_of_the_processor_s_own_rule(case: Case) -> None:
    whole = film(100, 64, 48)
    item = case.chosen(whole)
    assert len(item.frames) == case.one.taken
    if case.one.name in ("video_llava", "videoprism"):
        return  # their files name neither a rate nor a number
    metadata = {"total_num_frames": 100, "fps": 25.0, "duration": 4.0, "width": 64, "height": 48}
    theirs = case.rows(np.stack(whole.frames), do_sample_frames=True, video_metadata=[metadata])
    assert close(case.run([case.features(item)])[0].tokens, theirs)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 31, 750, 100_000, 3_000_000])
@pytest.mark.parametrize("options", [ItemOptions(), ItemOptions(fps=0.5), ItemOptions(max_frames=1)], ids=str)
def test_frames_lie_within_any_film_and_are_bounded(case: Case, num_frames: int, options: ItemOptions) -> None:
    for fps in (0.5, 25.0, 240.0):
        info = FilmInfo(num_frames=num_frames, fps=fps, seconds=num_frames / fps, width=64, height=48)
        chosen = list(case.adapter.preprocessor.choose_frames(info, options))
        assert chosen == sorted(chosen) and chosen[0] >= 0 and chosen[-1] < num_frames
        if case.one.name == "videoprism":
            assert len(chosen) == 4
        else:
            assert len(chosen) == len(set(chosen)) <= min(num_frames, options.max_frames or 768)


def test_the_language_model_drops_the_rows_that_the_mask_names(tmp_path: Path, context: LoadContext) -> None:
    """transformers has all rows come out of the tower and the mask applied behind it, also to rows that it is given."""
    case = Case(next(one for one in MODELS if one.name == "video_llama_3"), tmp_path, context)
    moving = film(4, 112, 112).frames
    still = np.array(moving[0])
    still[:28, :28] = 255 - still[:28, :28]  # one row's patches
    item = dataclasses.replace(film(5, 112, 112), frames=(moving[0], moving[0], still, moving[1], moving[1]))
    features = case.features(item)
    (out,) = case.run([features])
    names = ("pixel_values_videos", "video_grid_thw", "video_merge_sizes", "video_compression_mask")
    made = case.processor(videos=[np.stack(item.frames)], return_tensors="pt", do_sample_frames=False,
                          input_data_format="channels_last")  # fmt: skip
    told = features.details["video_compression_mask"]
    assert isinstance(told, list) and len(told) == features.num_tokens
    mask = torch.tensor(told).bool()
    assert mask.tolist() == made["video_compression_mask"].tolist()
    kept = [int(n) for n in mask.view(5, -1).sum(dim=1)]
    assert kept == [kept[0], 1, 1, kept[0], 1] and kept[0] == len(mask) // 5
    prompt = torch.tensor([[1, *[61] * sum(kept), 2]])
    rows = BaseModelOutputWithPooling(pooler_output=[out.tokens])  # type: ignore[arg-type]  # a list, as towers give
    with torch.inference_mode():
        whole = case.whole(input_ids=prompt, **{name: made[name] for name in names}).logits
        given = case.whole(input_ids=prompt, mm_encoder_outputs={"video": rows}, video_compression_mask=mask).logits
    assert close(given, whole)
    with pytest.raises(ValueError, match="do not match"):
        case.whole(input_ids=prompt, mm_encoder_outputs={"video": rows})


def test_the_price_from_the_header_is_not_below_the_real_cost(case: Case) -> None:
    table = case.adapter.cost_table()
    for sizes in (*SIZES[:5], (200, 640, 360)):
        item = film(*sizes)
        cost = case.features(case.chosen(item)).cost
        priced = MediaItem(
            modality=Modality.VIDEO,
            data=b"",
            digest="",
            width=item.info.width,
            height=item.info.height,
            seconds=item.info.seconds,
        )
        assert 0.8 * cost <= table.tokens(priced) <= 60 * cost


def test_frames_that_cannot_be_encoded_are_refused_with_the_reason(case: Case) -> None:
    with pytest.raises(EncoderError, match="frames of 3 x 900 pixels cannot be encoded") as caught:
        case.features(film(2, 3, 900))
    assert caught.value.code is ErrorCode.MEDIA_CORRUPT


def test_half_precision_works(case: Case, context: LoadContext) -> None:
    adapter = load_adapter(case.folder, dataclasses.replace(context, dtype=torch.bfloat16))
    features = case.features(case.chosen(film(8, 112, 112)))
    with torch.inference_mode():
        (out,) = adapter.forward(adapter.pack([features]))
    assert out.tokens.dtype is torch.bfloat16 and len(out.tokens) == features.num_tokens
    assert bool(out.tokens.isfinite().all())


def test_a_world_serves_films(case: Case) -> None:
    """Two ranks with whole weights share out the items; torchvision is there for every process."""
    path = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY)])
    sizes = ("--tp-size", "2", "--mm-encoder-tp-mode", "data", "--cache-bytes", "0")
    lists = [[noise_png(9 * count + n, 90, 64) for n in range(count)] for count in (4, 3, 1)]
    flat = np.full((48, 64, 3), 90, np.uint8)
    noisy = [np.asarray(Image.effect_noise((64, 48), 99).convert("RGB")) for _ in range(60)]
    file, whole = media.film("mp4", "libx264", [flat] * 60), media.film("matroska", "libx264", noisy)
    with World("--model-path", str(case.folder), *sizes, nproc=2, env={"PYTHONPATH": path}) as world:
        world.start().wait_ready(replicas=1)
        (model,) = world.http.get("/v1/models").json()["data"]
        assert model["family"] == "fallback" and "video" in model["modalities"]
        items = [{"video": [data_uri(one) for one in pictures]} for pictures in lists]
        found = world.http.post("/v1/encode", json={"items": items}).json()["data"]
        for pictures, one in zip(lists, found, strict=True):
            want = case.rows_of(_film_of(pictures)).numpy()
            assert off_by(vector(one), want[0] if case.adapter.preprocessor.is_pooled else want) <= 1e-5
        for sent in (file, whole, whole[: len(whole) // 2]):  # what is left of a film that was cut is encoded
            reply = world.http.post("/v1/encode", content=sent, headers={"content-type": "video/mp4"})
            assert reply.status_code == 200 and reply.json()["data"][0]["modality"] == "video", reply.text[:500]
        cut = world.http.post("/v1/encode", content=file[: len(file) // 2], headers={"content-type": "video/mp4"})
        assert cut.status_code == 422 and "the file ends within it" in cut.text, cut.text[:500]


def _film_of(pictures: list[bytes]) -> Film:
    frames = tuple(np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in pictures)
    return dataclasses.replace(film(len(frames), 90, 64), frames=frames)
