"""The page of the API's documentation: it shows, and loads nothing from elsewhere."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest
from support.gateways import FakeGateway, run_fake

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine
from baton.http.routes.operations import FOLDER

LOADED = re.compile(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)""")
SWAGGER_UI_5_35_0 = {
    "swagger-ui-bundle.js": "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
    "swagger-ui.css": "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
    "LICENSE": "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
    "NOTICE": "0d20d1adef18aee3f40dd258172155521ce702ac445cb5f7b7d60ed32dad2fb2",
    "swagger-ui-bundle.js.LICENSE.txt": "37eb6e7e59aed57b2c1acf076574b818ea07b74265717e0bd67b59e0baf9abbb",
}
"""SHA-256 of the files as npm's package has them."""


def policy_of(answer: httpx.Response) -> dict[str, str]:
    directives = answer.headers["content-security-policy"].split("; ")
    return dict(directive.split(" ", 1) for directive in directives)


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_pages_load_everything_from_the_gateway(fake_gateway: FakeGateway, path: str) -> None:
    with fake_gateway.client(follow_redirects=True) as client:
        page = client.get(path)
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "://" not in page.text
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|style=", page.text), "inline code"
        found = [address for address in LOADED.findall(page.text) if not address.startswith("data:")]
        for address in found:
            loaded = client.get(page.url.join(address))
            kind = {".js": "text/javascript", ".css": "text/css"}[Path(address).suffix]
            assert (loaded.status_code, loaded.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
            assert loaded.headers["x-content-type-options"] == "nosniff"
    assert len(found) == 3
    foreign = [address for address in LOADED.findall(page.text) if "//" in address]
    print(f"{path}: files loaded {len(found)}, of other hosts {len(foreign)}")


@pytest.mark.parametrize("path", ["/docs", "/docs/start.js", "/docs/swagger-ui-bundle.js", "/redoc"])
def test_the_policy_lets_the_browser_load_nothing_else(fake_gateway: FakeGateway, path: str) -> None:
    with fake_gateway.client() as client:
        policy = policy_of(client.get(path))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert not any("unsafe" in value or "http" in value or "*" in value for value in policy.values())


def test_the_page_shows_the_gateways_own_document_and_asks_no_validator() -> None:
    script = (FOLDER / "start.js").read_text()
    assert 'url: "openapi.json"' in script
    assert "validatorUrl: null" in script
    assert "http" not in script


def test_the_files_of_swagger_ui_are_those_that_were_published() -> None:
    found = {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in SWAGGER_UI_5_35_0}
    assert found == SWAGGER_UI_5_35_0
    ours = {"index.html", "start.js"}
    assert {path.name for path in FOLDER.iterdir()} == ours | set(found)


@pytest.mark.parametrize(
    "file",
    [
        "LICENSE",
        "index.html",
        "docs.py",
        "../docs.py",
        "..%2fdocs.py",
        "%2e%2e/docs.py",
        "x/start.js",
        "",
    ],
)
def test_no_other_file_is_served(fake_gateway: FakeGateway, file: str) -> None:
    with fake_gateway.client() as client:
        answer = client.get(f"/docs/{file}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_with_keys_the_page_and_its_files_are_closed(tmp_path: Path) -> None:
    create_key(tmp_path / "keys.json", "acme")
    with (
        run_fake(FakeEngine("a"), auth={"keys_file": tmp_path / "keys.json"}) as gateway,
        gateway.client() as client,
    ):
        for path in ("/docs", "/redoc", "/openapi.json", "/docs/start.js", "/docs/swagger-ui.css"):
            assert client.get(path).status_code == 401
