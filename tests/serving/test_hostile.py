"""A thousand hostile requests (bench/hostile.py), after which the server answers and has kept nothing of them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from dragoman.serving.settings import ServerSettings
from toy_run import Toy, make_sentences
from toy_server import serve_in_thread

BENCH = Path(__file__).resolve().parents[2] / "bench"
REQUESTS = 500
MEMORY = 100  # MB: far less than all bodies, or what each connection and request needs, would take together


@pytest.mark.slow
def test_a_server_survives_hostile_clients(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    from hostile import attack, read_memory

    sources = make_sentences(3)
    with serve_in_thread([toy.run], ServerSettings(receive_timeout=2, log_requests=False)) as server:
        expected = [result.text for result in toy.translator.translate(sources)]
        results = attack(server.url, REQUESTS, seed=1)
        before = read_memory(os.getpid())
        results += attack(server.url, REQUESTS, seed=2)
        assert sum(results.values()) == 2 * REQUESTS
        assert {"200", "400", "413", "431", "closed"} <= results.keys()
        assert not {status for status in results if status.startswith("5")}
        assert results["timeout"] == 0
        assert read_memory(os.getpid()) < before + MEMORY
        answer = server.client.post("/api/translate", json={"text": sources}).json()
        assert [translation["text"] for translation in answer["translations"]] == expected
        deadline = time.monotonic() + 30
        state = server.app.state.server
        while state.workers.admitted or len(server.server.server_state.connections) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not any(model.leases for model in state.pool.models.values())
