"""The kinds of faults that are publicly known of servers like this one, and the tests that hold each off.

Those of media alone, from data URIs to pixels, are in `tests/unit/test_media_corpus.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

KINDS = {
    # One input harms more than itself.
    "an item that fails ends its batch, its thread or the server": [
        "unit/test_scheduler.py::test_failures_are_the_items_own",
        "unit/test_compute.py::test_an_exception_reaches_its_caller_and_nobody_else",
        "faults/test_kills.py::test_a_poison_input_costs_at_most_two_deaths",
        "faults/test_kills.py::test_a_picture_that_ends_its_decoder_costs_itself_alone",
        "distributed/test_worst_inputs.py::test_each_beside_a_good_item_and_all_together",
    ],
    "what the caller sent looks like a fault of the server": [
        "distributed/test_worst_inputs.py::test_of_each_kind_alone_what_fails_is_the_callers_fault",
        "property/test_sweep_sounds.py::test_what_is_louder_is_no_sound",
    ],
    "everything hangs after one bad item by URL": ["distributed/test_worst_inputs.py::test_by_url"],
    "a size of pictures that nobody tried": [
        "property/test_sweep_pictures.py::test_sizes_about_those_of_patches",
        "property/test_sweep_pictures.py::test_long_and_large_sizes",
        "property/test_sweep_pictures.py::test_any_size",
        "property/test_sweep_pictures.py::test_every_small_size",
        "distributed/test_sizes.py::test_small_sizes",
    ],
    "a size or number of frames that nobody tried": [
        "property/test_sweep_films.py::test_numbers_of_frames_and_sizes",
        "property/test_sweep_films.py::test_any_frames_of_any_film",
    ],
    "a length of sounds that nobody tried": [
        "property/test_sweep_sounds.py::test_lengths_about_hops_and_windows",
        "property/test_sweep_sounds.py::test_any_length",
        "property/test_sweep_sounds.py::test_minutes",
    ],
    "requests of many sizes at once": [
        "distributed/test_worlds.py::test_many_clients_good_and_bad_items",
        "distributed/test_burst.py::test_with_the_default_limits_all_are_answered",
    ],
    "after one large item all others fail": ["distributed/test_sizes.py::test_large_and_long_pictures"],
    "an item that is larger than a batch never runs": [
        "unit/test_batcher.py::test_one_larger_item_runs_alone",
        "unit/test_ledger.py::test_a_large_item_runs_alone_and_is_not_overtaken",
        "unit/test_ledger.py::test_what_could_never_fit_is_too_large_and_probes_take_no_room",
    ],
    "an item costs far more than it was admitted for": [
        "property/test_resizing.py::test_pictures",
        "property/test_resizing.py::test_films",
        "property/test_resizing.py::test_squares_of_slices",
        "unit/test_media_frames.py::test_a_clip_is_a_film",
    ],
    "a long job ends at one bad file": [
        "unit/test_client_cli.py::test_failures_are_named_and_end_with_1",
        "unit/test_client_cli.py::test_a_folder_of_shards_goes_on",
    ],
    "a result is dropped between its look-up and its use": [
        "unit/test_ledger_held.py::test_dropped_between_lookup_and_use",
        "distributed/test_cache.py::test_what_was_dropped_is_encoded_anew_and_is_the_same",
    ],
    "a cache that is full": ["property/test_cache.py::test_least_recently_used_first"],
    # Wrong numbers and no error.
    "other rows than were promised": [
        "unit/test_engine_output.py::test_another_number_of_rows_than_was_promised",
        "contracts/test_family.py::test_promises_are_kept",
    ],
    "values that are not finite": ["unit/test_engine_output.py::test_one_value_that_is_not_finite"],
    "padding of a batch is seen by its items": [
        "contracts/test_family.py::test_a_batch_equals_its_pictures_in_any_order",
        "contracts/test_family_audio.py::test_a_batch_equals_its_sounds_in_any_order",
        "property/test_sweep_pictures.py::test_rows_of_small_sizes_do_not_depend_on_their_company",
    ],
    "rows of one kind of item in the place of another's": [
        "distributed/test_families.py::test_all_outputs_in_any_company"
    ],
    "a request raises a limit of films": [
        "property/test_sweep_films.py::test_frames_of_any_film",
        "contracts/test_family_video.py::test_frames_are_chosen_within_the_film_and_the_limits",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_tests(kind: str) -> None:
    assert KINDS[kind]
    for name in KINDS[kind]:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in named, name
