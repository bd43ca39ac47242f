"""TLS of a fetch: the name at the pinned address, and a certificate for that name."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from geo.sources.fetching import NAME, at_url
from geo.sources.hosts import RASTER, Host, Names, hosting, settings

from baton_geo.errors import SourceFailed
from baton_geo.sources import Sources

pytestmark = pytest.mark.fault("F6")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-made certificate for the name, with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "both.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-days", "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    made.write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return made


@pytest.fixture
def secure(certificate: Path) -> Iterator[Host]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with hosting(tls=context) as host:
        yield host


async def test_tls_asks_for_the_name_at_the_pinned_address(
    secure: Host, certificate: Path, tmp_path: Path
) -> None:
    """Though connected to by number, the host must be asked for its name, in TLS and in HTTP."""
    allowed = (f"*.example.org:{secure.port}", f"127.0.0.1:{secure.port}")
    names = Names({NAME: [["127.0.0.1"]]})
    trust = ssl.create_default_context(cafile=str(certificate))
    sources = Sources(settings(tmp_path, *allowed, allow_http=False), resolver=names, tls=trust)
    with await sources.open(at_url(f"https://{NAME}:{secure.port}/scene.tif")) as spooled:
        assert spooled.path.read_bytes() == RASTER
    assert secure.names == [NAME]
    assert secure.asked[0][1]["Host"] == f"{NAME}:{secure.port}"


@pytest.mark.parametrize(
    ("host", "trusted"), [("other.example.org", True), ("127.0.0.1", True), (NAME, False)]
)
async def test_certificates_are_checked_against_the_name(
    secure: Host, certificate: Path, tmp_path: Path, host: str, trusted: bool
) -> None:
    """A certificate of another name, or of nobody we trust, must be refused before anything is asked."""
    allowed = (f"*.example.org:{secure.port}", f"127.0.0.1:{secure.port}")
    names = Names({NAME: [["127.0.0.1"]], "other.example.org": [["127.0.0.1"]]})
    trust = ssl.create_default_context(cafile=str(certificate)) if trusted else None
    sources = Sources(settings(tmp_path, *allowed), resolver=names, tls=trust)
    with pytest.raises(SourceFailed, match="certificate is not valid"):
        await sources.open(at_url(f"https://{host}:{secure.port}/scene.tif"))
    assert secure.asked == []
