"""Kernels run in Triton's interpreter where there is no CUDA device, thousands of times slower: of tests that take long
there the first case is run every time, of the longest none, and all with `make test-all`."""

from __future__ import annotations

import pytest
import torch

LONG = frozenset(
    {
        "test_a_chain_equals_its_definition",
        "test_a_node_sees_what_its_path_as_a_chain_would_see_bit_for_bit",
        "test_gates_on_the_way_change_no_bit",
        "test_guesses_that_stay_on_the_device_are_the_same",
        "test_steps_sent_ahead_write_what_the_definition_writes",
        "test_what_is_kept_is_what_the_definition_keeps",
        "test_what_is_seen_is_that_of_the_definition",
        "test_what_needs_distributions_goes_by_steps",
        "test_who_puts_parts_together_and_when_pages_are_known_changes_no_bit",
    }
)
LONGEST = frozenset(
    {
        "test_a_drawn_draft_is_too",
        "test_a_head_in_8_bits_is_served_too",
        "test_a_longer_one_that_serves_runs_no_more_than_is_wanted",
        "test_a_sequence_without_pages_stops_and_harms_nobody",
        "test_a_step_behind_them_writes_what_the_definition_writes",
        "test_a_step_of_several_passes_equals_its_definition",
        "test_a_vocabulary_may_be_shorter_or_longer_than_the_drafts",
        "test_a_whole_draft_is_that_of_the_definition",
        "test_guesses_are_those_made_token_by_token",
        "test_how_many_rows_a_tile_has_changes_no_bit_in_float32",
        "test_no_kernel_of_attention_needs_a_large_stack",
        "test_steps_of_nothing_go_through_all_kernels",
        "test_tokens_are_drawn_from_what_the_step_left_though_larger_ones_have_come_since",
        "test_what_serves_for_a_step_gives_what_the_definition_gives",
        "test_what_was_rehearsed_is_recorded_and_gives_what_the_definition_gives",
    }
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    begun: set[str] = set()
    for item in items:
        name = getattr(item, "originalname", None)
        if name in LONGEST or name in begun:
            item.add_marker("slow")
        elif name in LONG:
            begun.add(name)
