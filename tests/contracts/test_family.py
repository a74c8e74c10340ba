"""What every model family promises, checked for each line of the registry against transformers' whole model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
from PIL import Image
from torch import Tensor

from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.models import registry
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, TowerOutput
from spmd_encoder.models.checkpoint import check_folder, read_model_type
from spmd_encoder.models.loading import adapter_class, load_adapter, resolve_dtype
from tests.harness.families import WholeModel

TOLERANCE = 1e-6
"""Largest difference over largest value at TP = 1."""


def pictures() -> list[Image.Image]:
    astronaut = Image.fromarray(skimage.data.astronaut())
    cat = Image.fromarray(skimage.data.chelsea())
    return [
        astronaut.resize((224, 224)),
        cat.resize((300, 200)),
        astronaut.resize((61, 340)),
        Image.new("RGB", (1, 1), (200, 30, 90)),
        cat.resize((500, 40)),
        Image.linear_gradient("L").convert("RGB").resize((130, 120)),
    ]


class Case:
    """One family's tiny checkpoint, loaded by us and, whole, by transformers."""

    def __init__(self, entry: registry.FamilyEntry, folder: Path, context: LoadContext) -> None:
        adapter_class(entry).tiny_checkpoint(folder, seed=3)
        self.entry = entry
        self.folder = folder
        self.context = context
        self.adapter = load_adapter(folder, context)
        self.reference = WholeModel(entry.family, folder).encode

    def run(self, items: list[Features]) -> list[TowerOutput]:
        with torch.inference_mode():
            return self.adapter.forward(self.adapter.pack(items))


CONVOLUTIONAL = ("dinov3_convnext",)
"""Families without attention."""
WINDOWS = {"colmodernvbert": 32}
"""Keys that are looked at together where a family's rows see near ones alone: no mask is larger, whatever the batch."""

PICTURES = [entry for entry in registry.FAMILIES if Modality.IMAGE in adapter_class(entry).modalities]


@pytest.fixture(scope="module", params=PICTURES, ids=lambda entry: entry.family)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, context: LoadContext) -> Case:
    entry: registry.FamilyEntry = request.param
    return Case(entry, tmp_path_factory.mktemp(entry.family), context)


def close(got: Tensor | None, want: Tensor | None, tolerance: float = TOLERANCE) -> bool:
    if got is None or want is None:
        return got is want
    return got.shape == want.shape and bool((got - want).abs().max() <= tolerance * want.abs().max())


def test_a_picture_alone_equals_transformers(case: Case) -> None:
    for image in pictures():
        (out,) = case.run([case.adapter.preprocess(image)])
        tokens, pooled = case.reference(image)
        assert close(out.tokens, tokens), image.size
        assert close(out.pooled, pooled), image.size


def test_a_batch_equals_its_pictures_in_any_order(case: Case) -> None:
    features = [case.adapter.preprocess(image) for image in pictures()]
    alone = [case.run([item])[0] for item in features]
    for order in (range(6), (5, 0, 3, 1, 4, 2), (2, 2, 0)):
        keys = {case.adapter.batch_key(features[i]) for i in order}
        assert len(keys) == 1, "these pictures are meant to merge"
        for i, out in zip(order, case.run([features[i] for i in order]), strict=True):
            assert close(out.tokens, alone[i].tokens)
            assert close(out.pooled, alone[i].pooled)


def test_no_mask_grows_with_the_square_of_a_batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, tuple[int, ...] | None]] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, *args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        calls.append((query.shape[-2], None if attn_mask is None else tuple(attn_mask.shape)))
        return attention(query, *args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    features = [case.adapter.preprocess(image) for image in pictures()]
    case.run(features)
    assert calls or case.entry.family in CONVOLUTIONAL
    # With a class token and registers, or the words around a picture.
    longest = max(max(item.cost + 5, item.num_tokens) for item in features)
    for rows, mask in calls:
        assert rows <= longest, "pictures are attended to together"
        near = mask is not None and mask[-1] <= WINDOWS.get(case.entry.family, 0)
        assert mask is None or mask[-2] == 1 or near, f"a mask of {mask}"


def test_promises_are_kept(case: Case) -> None:
    adapter = case.adapter
    for image in pictures():
        features = adapter.preprocess(image)
        (out,) = case.run([features])
        shapes = {OutputKind.TOKENS: (features.num_tokens, adapter.embedding_dims[OutputKind.TOKENS])}
        assert out.tokens.shape == shapes[OutputKind.TOKENS]
        assert (out.pooled is not None) == (OutputKind.POOLED in adapter.outputs)
        if out.pooled is not None:
            assert out.pooled.shape == (adapter.embedding_dims[OutputKind.POOLED],)
            assert bool(torch.isfinite(out.pooled).all())
        assert bool(torch.isfinite(out.tokens).all())
        if features.grid is not None:  # a family's slices may be of several sizes
            t, h, w = features.grid
            assert features.cost == t * h * w


def test_results_are_bit_stable_and_depend_on_the_picture(case: Case) -> None:
    first, second, *_ = (case.adapter.preprocess(image) for image in pictures())
    one, again, other = case.run([first])[0], case.run([first])[0], case.run([second])[0]
    assert torch.equal(one.tokens, again.tokens)
    assert not torch.allclose(one.tokens.mean(0), other.tokens.mean(0), atol=1e-3)


def test_the_price_from_the_header_is_near_the_real_cost(case: Case) -> None:
    table = case.adapter.cost_table()
    for size in ((224, 224), (640, 480), (1920, 1080), (333, 1000)):
        cost = case.adapter.preprocess(Image.new("RGB", size)).cost
        assert abs(table.image_tokens(*size) - cost) <= 0.25 * cost, size


def test_declarations_fit_together(case: Case) -> None:
    adapter: FamilyAdapter = case.adapter
    assert adapter.family == case.entry.family
    assert adapter.model_types == case.entry.model_types
    assert read_model_type(case.folder) in adapter.model_types
    assert adapter.default_output in adapter.outputs
    assert adapter.tower_bytes > 0
    check_folder(case.folder)
    assert resolve_dtype("auto", case.folder) is torch.float32


def test_small_and_long_pictures_work_or_are_refused_clearly(case: Case) -> None:
    red = _values(case.adapter.preprocess(Image.new("RGB", (64, 64), (255, 0, 0))))
    for size in ((1, 1), (1, 2), (3, 1), (3, 3), (1, 200), (200, 1), (3, 500), (27, 29)):
        features = case.adapter.preprocess(Image.new("RGB", size, (255, 0, 0)))
        assert _values(features) == red, f"{size}: the channels were mixed up"
    for size in ((1, 201), (5000, 2)):
        with pytest.raises(EncoderError, match=f"{size[0]} x {size[1]} pixels") as caught:
            case.adapter.preprocess(Image.new("RGB", size))
        assert caught.value.code is ErrorCode.MEDIA_CORRUPT


def _values(features: Features) -> dict[float, float]:
    """The values of a picture's model-ready pixels with their shares; a picture of one colour has one per channel.

    Of its first tile or patch, which is no padding in any family.
    """
    values, counts = features.tensors["pixel_values"][0].round(decimals=4).unique(return_counts=True)
    assert len(values) <= 3, "a picture of one colour became one of several"
    shares = (counts / counts.sum()).tolist()
    return {round(value, 4): round(share, 4) for value, share in zip(values.tolist(), shares, strict=True)}


def test_half_precision_works(case: Case) -> None:
    adapter = load_adapter(case.folder, dataclasses.replace(case.context, dtype=torch.bfloat16))
    image = pictures()[0]
    with torch.inference_mode():
        (out,) = adapter.forward(adapter.pack([adapter.preprocess(image)]))
    assert out.tokens.dtype is torch.bfloat16
    assert adapter.tower_bytes == case.adapter.tower_bytes // 2
    assert close(out.tokens.float(), case.reference(image)[0], tolerance=0.1)


def test_the_tiny_checkpoint_is_the_same_bytes_for_the_same_seed(case: Case, tmp_path: Path) -> None:
    cls = adapter_class(case.entry)
    cls.tiny_checkpoint(tmp_path / "same", seed=3)
    cls.tiny_checkpoint(tmp_path / "other", seed=4)
    mine = (case.folder / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == mine
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != mine


def test_a_missing_processor_is_named(case: Case, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(case.folder / name)
    with pytest.raises(StartupError, match="ImageProcessor"):
        load_adapter(tmp_path, case.context)
