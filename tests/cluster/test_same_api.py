"""What holds for one server holds for two replicas: the same tests, at another address."""

from __future__ import annotations

from tests.cluster.conftest import needs_ray
from tests.server.test_endpoints import (  # noqa: F401
    test_a_name_that_is_nearly_right_gets_the_right_one,
    test_a_prompt_is_scored_as_evaluations_do,
    test_an_echo_is_streamed_as_it_is_given_whole,
    test_an_echo_is_the_prompt_as_it_was_sent,
    test_bodies_that_are_no_requests,
    test_how_far_a_prompt_was_read_comes_first,
    test_pages_of_other_origins_get_no_leave,
    test_sums_over_requests_equal_the_counters,
    test_tokens_and_back,
    test_unknown_places_and_methods,
    test_what_an_answer_cost,
    test_what_it_costs_so_far_is_told_with_every_chunk,
)
from tests.server.test_openai import *  # noqa: F403

pytestmark = needs_ray
