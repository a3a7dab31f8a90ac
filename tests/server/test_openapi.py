"""The OpenAPI description, tried by schemathesis where it is installed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.server.conftest import ADMIN_KEY, API_KEY

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
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
    return [
        each.ok()
        for each in found.include(
            path_regex="^/v1/(scope|activations|steering)"
        ).get_all_operations()
    ]


def test_every_route_does_what_its_description_says(operations):
    assert len(operations) == 16
    for operation in operations:

        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def tried(case):
            case.call_and_validate(headers=HEADERS, checks=CHECKS)

        tried()
