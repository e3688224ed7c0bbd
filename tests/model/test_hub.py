"""Configurations from a hub: a server on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from paraplan.errors import ModelError
from paraplan.model.hub import hub_config


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/owner/model/resolve/main/config.json"
        allowed = self.headers.get("Authorization") == "Bearer secret"
        self.send_response(200 if known and allowed else 401 if known else 404)
        self.end_headers()
        if known and allowed:
            self.wfile.write(b'{"model_type": "llama"}')

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(tmp_path)}
    server.shutdown()
    server.server_close()


def test_a_config_is_fetched_once_with_the_token(environment: dict[str, str]) -> None:
    path = hub_config("owner/model", environment | {"HF_TOKEN": "secret"})
    assert path.read_text() == '{"model_type": "llama"}'
    assert hub_config("owner/model", environment | {"HF_HUB_OFFLINE": "1"}) == path


@pytest.mark.parametrize(("name", "reason"), [("owner/model", "it needs a token"), ("owner/none", "there is none of")])
def test_why_a_config_is_not_given_is_said(environment: dict[str, str], name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        hub_config(name, environment)


def test_what_huggingface_hub_has_downloaded_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    found = hub_config("owner/model", {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert found == folder / "snapshots" / "abc" / "config.json"
