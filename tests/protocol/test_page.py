"""The page at `/`: built files of an exact list, without a key; and nothing else of the disk."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hatchling.builders.wheel import WheelBuilder
from support.gateways import FakeGateway, raw_status, run_fake

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine
from baton.http.routes import page
from baton.serve import welcome

SCRIPT = "assets/index-D3adB_3f.js"
FILES = {
    "index.html": b"<!doctype html><script type=module src=/ui/"
    + SCRIPT.encode()
    + b"></script>"
    + b" " * 900,
    SCRIPT: b"console.log('page');\n" * 500,
    "assets/index-abcd1234.css": b"body { margin: 0 }\n" * 100,
    "assets/icon.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "assets/dot-00aa11bb.png": b"\x89PNG\r\n" + bytes(range(200)),
    "licenses.txt": b"MIT",
    "apple-touch-icon.png": b"\x89PNG\r\n",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/ui/{name}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build of the page, with what must not be served beside it and in it."""
    built = tmp_path / "ui"
    (built / "assets").mkdir(parents=True)
    for name, body in FILES.items():
        (built / name).write_bytes(body)
    (tmp_path / "secret.js").write_text("secret")
    (built / "assets/link.js").symlink_to(tmp_path / "secret.js")
    (built / "notes.md").write_text("secret")
    (built / "index.html.map").write_text("secret")
    monkeypatch.setattr(page.page_files, "__defaults__", (built,))
    return built


@pytest.fixture
def keyed(folder: Path, tmp_path: Path) -> Iterator[FakeGateway]:
    create_key(tmp_path / "keys.json", "acme")
    with run_fake(FakeEngine("a"), auth={"keys_file": tmp_path / "keys.json"}) as gateway:
        yield gateway


def test_the_files_need_no_key_and_everything_else_does(keyed: FakeGateway) -> None:
    with keyed.client() as client:
        for name, body in FILES.items():
            answer = client.get(path_of(name))
            assert (answer.status_code, answer.content) == (200, body), name
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "set-cookie" not in answer.headers
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                assert client.request(method, path_of(name)).status_code == 405
        for path in ("/v1/engines", "/v1/events", "/v1/handoffs", "/docs", "/openapi.json", "/ui/", "/ui"):
            assert client.get(path).status_code == 401, path


def test_the_types_are_those_that_browsers_ask_for(keyed: FakeGateway) -> None:
    kinds = [
        "text/html",
        "text/javascript",
        "text/css",
        "image/svg+xml",
        "image/png",
        "text/plain",
        "image/png",
    ]
    with keyed.client() as client:
        found = [client.get(path_of(name)).headers["content-type"] for name in FILES]
    assert [kind.partition(";")[0] for kind in found] == kinds
    assert all("charset=utf-8" in kind for kind in found if not kind.startswith("image/png"))


@pytest.mark.fault("G12")
def test_no_other_file_is_served_by_any_spelling(folder: Path) -> None:
    """Names are looked up in a list: none of them reaches the disk."""
    hostile = [
        "/ui/index.html", "/ui/notes.md", "/ui/index.html.map", "/ui/assets/link.js", "/ui/assets", "/ui/assets/",
        "/ui/../secret.js", "/ui/..%2fsecret.js", "/ui/%2e%2e/secret.js", "/ui/assets/../../secret.js",
        "/ui/assets/..%2f..%2fsecret.js", "/ui//etc/passwd", "/ui/%2fetc%2fpasswd", "/ui/..\\secret.js",
        "/ui/assets/index-D3adB_3f.js%00", "/ui/assets/index-D3adB_3f.js/", "/UI/licenses.txt", "/ui/LICENSES.TXT",
        "/ui/licenses.txt%20", "/ui/./licenses.txt", "/ui/licenses%2etxt/x", "//", "/index.html", "/assets/icon.svg",
        "/ui/" + "x" * 9000,
    ]  # fmt: skip
    with run_fake(FakeEngine("a")) as gateway:
        told = {path: raw_status(gateway.url, "GET", path) for path in hostile}
        (folder / "assets/later.js").write_text("secret")
        (folder / "licenses.txt").write_text("secret")
        assert raw_status(gateway.url, "GET", "/ui/assets/later.js") == 404
        assert httpx.get(f"{gateway.url}/ui/licenses.txt").text == "MIT"
    found = {path: status for path, status in told.items() if status not in (400, 404)}
    print(f"G12: {len(hostile)} spellings, {len(found)} answered with a file")
    assert found == {}


def test_what_has_a_hash_in_its_name_is_kept_and_the_rest_is_asked_for_again(keyed: FakeGateway) -> None:
    lasting = {SCRIPT, "assets/index-abcd1234.css", "assets/dot-00aa11bb.png"}
    with keyed.client() as client:
        for name in FILES:
            answer = client.get(path_of(name))
            kept = "public, max-age=31536000, immutable" if name in lasting else "no-cache"
            assert answer.headers["cache-control"] == kept, name
            tag = answer.headers["etag"]
            for known in (tag, f'"x", {tag}', "*"):
                again = client.get(path_of(name), headers={"If-None-Match": known})
                assert (again.status_code, again.content) == (304, b"")
                assert (again.headers["etag"], again.headers["cache-control"]) == (tag, kept)
            assert client.get(path_of(name), headers={"If-None-Match": 'W/"other"'}).status_code == 200


@pytest.mark.parametrize(
    ("accepts", "packs"),
    [
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("x-gzip", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("br", False),
        ("identity", False),
        ("", False),
    ],
)
def test_it_is_compressed_for_those_who_take_that(keyed: FakeGateway, accepts: str, packs: bool) -> None:
    with keyed.client(headers={"Accept-Encoding": accepts}) as client:
        with client.stream("GET", path_of(SCRIPT)) as answer:
            raw = b"".join(answer.iter_raw())
            assert answer.headers.get("content-encoding") == ("gzip" if packs else None)
            assert answer.headers["vary"] == "Accept-Encoding"
            assert int(answer.headers["content-length"]) == len(raw)
        assert (gzip.decompress(raw) if packs else raw) == FILES[SCRIPT]
        picture = client.get(path_of("assets/dot-00aa11bb.png"))
        assert "content-encoding" not in picture.headers


def test_head_is_get_without_the_content(keyed: FakeGateway) -> None:
    with keyed.client() as client:
        for name in FILES:
            get, head = client.get(path_of(name)), client.head(path_of(name))
            assert (head.status_code, head.content) == (200, b"")
            for header in (
                "content-length",
                "etag",
                "content-type",
                "cache-control",
                "content-security-policy",
            ):
                assert head.headers[header] == get.headers[header]


def test_another_host_is_not_answered_on_loopback_without_keys(folder: Path) -> None:
    """A page of another site that points its own name here would read it as its own."""
    with run_fake(FakeEngine("a")) as gateway:
        assert httpx.get(gateway.url, headers={"Host": "evil.example"}).status_code == 421
        assert httpx.get(gateway.url).status_code == 200


@pytest.mark.parametrize("why", ["disabled", "not built"])
def test_without_the_page_its_paths_are_what_they_were(folder: Path, tmp_path: Path, why: str) -> None:
    (folder / "index.html").unlink() if why == "not built" else None
    options = {"ui": {"enabled": why != "disabled"}}
    create_key(tmp_path / "keys.json", "acme")
    with run_fake(FakeEngine("a"), **options) as gateway:
        for path in map(path_of, FILES):
            answer = httpx.get(f"{gateway.url}{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    with run_fake(FakeEngine("a"), auth={"keys_file": tmp_path / "keys.json"}, **options) as gateway:
        assert {httpx.get(f"{gateway.url}{path_of(name)}").status_code for name in FILES} == {401}


def test_the_start_names_the_address_of_the_page() -> None:
    for there in (True, False):
        text = welcome("http://127.0.0.1:8000", "http://127.0.0.1:8000", [], keyed=False, page=there)
        assert ("http://127.0.0.1:8000/\n" in text) is there
        assert "http://127.0.0.1:8000/docs" in text


def test_the_wheel_holds_every_file_of_the_page() -> None:
    root = Path(page.__file__).parents[4]
    held = {each.distribution_path for each in WheelBuilder(str(root)).recurse_included_files()}
    assert "baton/http/swagger_ui/index.html" in held
    shipped = {path for path in (root / "app/baton/ui").rglob("*") if path.is_file()}
    assert {str(path.relative_to(root / "app")) for path in shipped} <= held


def test_the_page_that_is_shipped_loads_nothing_that_is_not_shipped() -> None:
    """Where it was built: `ui/` has its source."""
    files = page.page_files(Path(page.__file__).parents[2] / "ui")
    for path, file in files.items():
        if path.endswith((".html", "/")):
            text = file.body.decode()
            assert "<style" not in text
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", text), "inline code"
            for loaded in re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)""", text):
                assert "//" not in loaded
                assert loaded.startswith("data:") or f"/{loaded.lstrip('./')}" in files or loaded == "/docs"
