"""Schemathesis makes requests from the OpenAPI document: none makes the server fail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from dragoman.serving.app import create_app
from dragoman.serving.settings import ServerSettings
from toy_run import Toy

EXAMPLES = 6  # requests per operation


@pytest.mark.slow
def test_no_request_makes_the_server_fail(toy: Toy) -> None:
    app = create_app(
        [toy.run], ServerSettings(log_requests=False, open_access=True)
    )  # Schemathesis starts and stops it
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/metrics":
            continue

        @seed(1)
        @settings(max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy() | operation.as_strategy(schemathesis.GenerationMode.NEGATIVE))
        def send(case: Any) -> None:
            answer = case.call()
            statuses[answer.status_code] += 1
            if answer.status_code >= 500:
                failures.append(f"{case.method} {case.path} {case.body!r:.500}: {answer.status_code} {answer.text}")

        send()
    assert not failures, "\n".join(failures)
    assert statuses[200]
    assert statuses[400] > 5
