"""Runs the API tests of a single server against two replicas."""

from __future__ import annotations

from tests.cluster.conftest import needs_ray
from tests.server.test_token_details import (  # noqa: F401
    test_a_stream_tells_what_the_whole_answer_tells,
    test_rounds_are_told_without_the_rest,
    test_the_last_token_gives_out_what_is_left_of_a_character,
)
from tests.server.test_endpoints import *  # noqa: F403
from tests.server.test_openai import *  # noqa: F403

pytestmark = needs_ray
del test_what_it_tells_of_itself  # noqa: F821  # of each replica, too: tests/cluster/test_replicas.py
