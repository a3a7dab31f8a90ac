"""The OpenAPI description, tried by schemathesis, which has an environment of its own:
`make test` puts it beside the main one for this file."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from tests.server.conftest import ADMIN_KEY, API_KEY

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

HEADERS = {"Authorization": f"Bearer {API_KEY}", "X-Scope-Admin-Key": ADMIN_KEY}
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def operations(server):
    found = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    ours = found.include(path_regex="^/v1/(scope|activations|steering)").get_all_operations()
    return [each.ok() for each in ours]


@pytest.mark.long
@pytest.mark.parametrize("mode", GenerationMode)
def test_every_route_does_what_its_description_says(mode, operations):
    """With what it allows, and with what it does not."""
    assert len(operations) == 24
    checks = CHECKS + ([negative_data_rejection] if mode is GenerationMode.NEGATIVE else [])
    for operation in operations:
        # schemathesis filters out most of what it draws.
        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def tried(case):
            case.call_and_validate(headers=HEADERS, checks=checks)

        try:
            tried()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # there is nothing to get wrong
