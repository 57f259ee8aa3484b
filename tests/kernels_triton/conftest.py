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
        "test_drafts_that_stay_on_the_device_are_the_same",
        "test_async_steps_generate_what_the_definition_generates",
        "test_stored_kv_equals_the_definition",
        "test_draft_attention_equals_the_definition",
        "test_drafts_with_distributions_run_step_by_step",
        "test_split_assignment_and_prefetching_change_no_bit",
    }
)
LONGEST = frozenset(
    {
        "test_a_sampled_draft_matches_too",
        "test_an_int8_head_matches_too",
        "test_a_longer_captured_chain_runs_only_the_wanted_steps",
        "test_a_sequence_without_pages_stops_and_leaves_others_alone",
        "test_the_step_after_a_device_draft_equals_the_definition",
        "test_a_step_of_several_passes_equals_its_definition",
        "test_a_vocabulary_may_be_shorter_or_longer_than_the_drafts",
        "test_a_single_graph_draft_equals_the_definition",
        "test_drafts_equal_those_drafted_token_by_token",
        "test_how_many_rows_a_tile_has_changes_no_bit_in_float32",
        "test_no_kernel_of_attention_needs_a_large_stack",
        "test_dummy_steps_run_all_kernels",
        "test_tokens_are_sampled_from_the_logits_of_their_own_step",
        "test_a_padded_graph_gives_what_the_definition_gives",
        "test_warmed_up_graphs_give_what_the_definition_gives",
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
