"""Runs the API tests of a single server against two replicas."""

from __future__ import annotations

from tests.cluster.conftest import needs_ray
from tests.server.test_endpoints import *  # noqa: F403
from tests.server.test_openai import *  # noqa: F403
from tests.server.test_token_details import (  # noqa: F401
    test_a_stream_has_the_details_of_the_complete_response,
    test_rounds_are_returned_without_token_details,
    test_the_last_token_gets_an_incomplete_character,
)

pytestmark = needs_ray
del test_status_endpoints  # noqa: F821  # of each replica, too: tests/cluster/test_replicas.py
