"""A replica's tower runs before its leader says hello: no request is to pay for, or fail on, what can be found then.

The batches go the way of all batches, on every rank of the group: a tiny item, a very long picture, then ever larger
ones, up to what the limits allow and as far as the time that is given reaches. Films are among them where a model takes
no pictures: elsewhere they go through the same tower.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from PIL import Image

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import ItemOptions, MediaItem, Modality
from spmd_encoder.errors import EncoderError, StartupError
from spmd_encoder.media.base import Film, FilmInfo, Sound
from spmd_encoder.models.base import Features, Preprocessor
from spmd_encoder.models.own_code import ModelFailedError, does_not_suit
from spmd_encoder.models.settings import settings_of

log = logging.getLogger(__name__)

SECONDS: Mapping[str, float] = MappingProxyType({"cpu": 0.5, "cuda": 20.0})
"""How long the large batches may take together, by device. On a CPU they find nothing that small ones do not."""

GROWTH = 4
_POWER = 1.5
"""Work grows with its tokens at least in proportion, and at most with their square, by attention."""

_TINY, _LONG = (1, 1), (1400, 7)
_PLAIN_SIDE, _TILED_SIDE = 224, 4096
_SHORT_S = 1.0
_WINDOW_S = 30.0
"""Of a large batch's sounds, however long a sound the family takes: what most of them take at once."""
_FILM_S, _FPS = 10.0, 8.0
"""Length of a large batch's films, and frames of a second before any are chosen."""
_TOKENS_FLAG, _PIXELS_FLAG = "--max-batch-tokens", "--max-image-pixels"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A batch of `count` equal items: pictures of `size` (width, height), sounds of `seconds`, or films with both.

    `cost` is the whole batch's, in encoder tokens; `flag` is the one to lower where it is too much.
    """

    modality: Modality
    cost: int
    count: int = 1
    size: tuple[int, int] = _TINY
    seconds: float = 0.0
    flag: str = _TOKENS_FLAG


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a batch may hold, and a picture."""

    max_items: int
    max_tokens: int
    max_pixels: int


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """`left_out`: the first batch that would have taken too long."""

    batches: int
    cost: int
    seconds: float
    left_out: Trial | None

    def __str__(self) -> str:
        if not self.batches:
            return f"nothing that this model takes was tried, in {self.seconds:.2f} s"
        said = f"{self.batches} batches of up to {self.cost} tokens in {self.seconds:.2f} s"
        return f"{said}; one of {self.left_out.cost} would take too long" if self.left_out else said


def small_trials(table: CostTable, modalities: Collection[Modality]) -> list[Trial]:
    """Always run: the least item first."""
    found = []
    if Modality.IMAGE in modalities:
        found += [Trial(modality=Modality.IMAGE, cost=table.image_tokens(*s), size=s) for s in (_TINY, _LONG)]
    if Modality.AUDIO in modalities and table.audio is not None:
        found.append(Trial(modality=Modality.AUDIO, cost=table.audio.tokens(_SHORT_S), seconds=_SHORT_S))
    if _by_films(table, modalities):
        found += [_films(table, _TINY, _SHORT_S), _films(table, (_PLAIN_SIDE, _PLAIN_SIDE), _SHORT_S)]
    return found


def ordinary_trial(table: CostTable, modalities: Collection[Modality]) -> Trial | None:
    """A picture of the size that most models are made for. Only pictures: of the rest, small ones are ordinary too."""
    if Modality.IMAGE not in modalities:
        return None
    size = (_PLAIN_SIDE, _PLAIN_SIDE)
    return Trial(modality=Modality.IMAGE, cost=table.image_tokens(*size), size=size)


def large_trials(table: CostTable, modalities: Collection[Modality], bounds: Bounds) -> list[Trial]:
    """By cost: up to the largest batch, and the largest picture where that is more (it runs alone)."""
    trials = [*_pictures(table, bounds)] if Modality.IMAGE in modalities else []
    if Modality.AUDIO in modalities and table.audio is not None:
        seconds = min(table.audio.max_s, _WINDOW_S)
        price = table.audio.tokens(seconds)
        for count in _counts(price, bounds):
            sounds = Trial(modality=Modality.AUDIO, cost=count * price, count=count, seconds=seconds)
            trials.append(sounds)
    if _by_films(table, modalities):
        one = _films(table, (_PLAIN_SIDE, _PLAIN_SIDE), _FILM_S)
        trials += [replace(one, count=count, cost=count * one.cost) for count in _counts(one.cost, bounds)]
    return sorted(trials, key=lambda trial: trial.cost)


def _by_films(table: CostTable, modalities: Collection[Modality]) -> bool:
    return Modality.VIDEO in modalities and Modality.IMAGE not in modalities and table.video is not None


def _films(table: CostTable, size: tuple[int, int], seconds: float) -> Trial:
    film = MediaItem(modality=Modality.VIDEO, data=b"", digest="", width=size[0], height=size[1], seconds=seconds)
    return Trial(modality=Modality.VIDEO, cost=table.tokens(film), size=size, seconds=seconds)


def _pictures(table: CostTable, bounds: Bounds) -> Iterator[Trial]:
    cost = table.image_tokens(*_TINY)
    tokens = cost
    while tokens < bounds.max_tokens:
        tokens = min(GROWTH * tokens, bounds.max_tokens)
        side = _side(table, tokens, bounds.max_pixels)
        price = table.image_tokens(side, side)
        count = max(1, min(tokens // price, bounds.max_items))
        if cost < count * price <= bounds.max_tokens:
            cost = count * price
            yield Trial(modality=Modality.IMAGE, cost=cost, count=count, size=(side, side))
    side = math.isqrt(bounds.max_pixels)
    if table.tiling is not None:
        side = min(side, _TILED_SIDE)  # as many tiles as of any larger picture
    elif table.max_pixels:
        side = min(side, math.isqrt(table.max_pixels))
    if (price := table.image_tokens(side, side)) > cost:
        yield Trial(modality=Modality.IMAGE, cost=price, size=(side, side), flag=_PIXELS_FLAG)


def _side(table: CostTable, tokens: int, max_pixels: int) -> int:
    """Of the largest square picture that costs no more."""
    if table.fixed_tokens is not None:
        return _PLAIN_SIDE
    merged = math.isqrt(tokens // table.merge**2)
    return max(1, min(merged * table.merge * table.patch, math.isqrt(max_pixels)))


def _counts(price: int, bounds: Bounds) -> Iterator[int]:
    most = max(1, min(bounds.max_tokens // price, bounds.max_items))
    count = 1
    while count < most:
        yield count
        count = min(GROWTH * count, most)
    yield most


def features_for(preprocessor: Preprocessor, trial: Trial) -> list[Features]:
    """The trial's items. Raises EncoderError where the family does not take them."""
    if trial.modality is Modality.AUDIO:
        rate = preprocessor.sampling_rate
        samples = 0.1 * np.random.default_rng(0).standard_normal(int(trial.seconds * rate), np.float32)
        return [preprocessor.preprocess_audio(Sound(samples=samples, rate=rate))] * trial.count
    noise = Image.effect_noise(trial.size, 64).convert("RGB")
    if trial.modality is Modality.VIDEO:
        return [preprocessor.preprocess_video(_film(preprocessor, noise, trial.seconds))] * trial.count
    return [preprocessor.preprocess(noise)] * trial.count


def _features_or_why(preprocessor: Preprocessor, trial: Trial, folder: Path) -> list[Features] | str:
    """The trial's items, or why the family does not take them."""
    with settings_of(folder):
        try:
            return features_for(preprocessor, trial)
        except EncoderError as error:
            log.debug("the warm-up leaves out what this model does not take: %s", error.message)
            return error.message


def _film(preprocessor: Preprocessor, picture: Image.Image, seconds: float) -> Film:
    """One that shows the picture all the time, with the frames that the family chooses."""
    width, height = picture.size
    count = int(seconds * _FPS)
    info = FilmInfo(num_frames=count, fps=_FPS, seconds=seconds, width=width, height=height)
    chosen = tuple(preprocessor.choose_frames(info, ItemOptions()))
    times = tuple(index / _FPS for index in chosen)
    return Film(frames=(np.asarray(picture),) * len(chosen), times=times, indices=chosen, info=info)


async def warm_up(
    run: Callable[[Sequence[Features], str], Awaitable[None]],
    preprocessor: Preprocessor,
    small: Sequence[Trial],
    large: Sequence[Trial],
    *,
    ordinary: Trial | None = None,
    folder: Path,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> WarmUp:
    """Run `small`, and of `large` as many as will not take longer than `seconds`, by the time that the last one took.

    `run(items, flag)` runs one batch. Raises what it raises: StartupError where a batch shows that the model cannot
    be served like this. So it does where the settings in `folder`, the checkpoint's, break its processor, and where
    that refuses every single item of `large` too. What the model's own code fails for is left out, unless it fails for
    all of `small` of a modality, and for `ordinary` too.
    """
    began = clock()
    batches = cost = 0
    took, of_cost, refused = 0.0, 1, ""
    failed: dict[Modality, str] = {}
    taken: set[Modality] = set()

    async def one(trial: Trial) -> None:
        nonlocal batches, cost, took, of_cost, refused
        started = clock()
        items = await asyncio.to_thread(_features_or_why, preprocessor, trial, folder)
        if isinstance(items, str):
            refused = items
            return
        try:
            await run(items, trial.flag)
        except ModelFailedError as error:
            failed[trial.modality] = str(error)
            log.debug("the warm-up leaves out what this model fails for: %s", error, exc_info=True)
            return
        taken.add(trial.modality)
        batches, cost = batches + 1, max(cost, trial.cost)
        took, of_cost = clock() - started, trial.cost

    # What is made at the first run is no measure of the next.
    for trial in [*small[:1], *small]:
        await one(trial)
    for modality in failed.keys() - taken:
        if ordinary is not None and ordinary.modality is modality:
            await one(ordinary)
        if modality not in taken:
            raise does_not_suit(f"{folder}: {failed[modality]}")
    left_out, spent = None, 0.0
    for trial in large:
        if spent + took * (trial.cost / of_cost) ** _POWER > seconds:
            left_out = trial
            break
        started = clock()
        await one(trial)
        spent += clock() - started
    for modality, why in failed.items():
        log.warning("some %s items of the warm-up cannot be encoded: %s", modality, why)
    if large and refused and not batches:
        raise StartupError(
            f"{folder}: this model's processor takes nothing that it is given ({refused}): its settings do not suit "
            "the model; compare config.json and the processor's file with the original's, or download them again"
        )
    return WarmUp(batches=batches, cost=cost, seconds=clock() - began, left_out=left_out)
