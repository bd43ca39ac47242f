"""Check addresses with `baton_fetch`, and raise this plugin's errors for its refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from baton_fetch import addresses
from baton_fetch.addresses import AllowedHosts, Target, is_public
from baton_fetch.errors import FetchFailed, FetchRefused
from baton_geo.errors import SourceFailed, SourceRefused

FIELD = "data.data"


def allowed_hosts(entries: Iterable[str]) -> AllowedHosts:
    """Parse the hosts of the setting `baton_geo.allowed_hosts`.

    Raises:
        ValueError: an entry is not a host.
    """
    return AllowedHosts(entries, "baton_geo.allowed_hosts")


def target_of(url: str, hosts: AllowedHosts, *, allow_http: bool) -> Target:
    """Parse a client's address.

    Raises:
        SourceRefused: the address is malformed, or its host is not in `hosts`.
    """
    with fetch_errors():
        require_hosts(hosts)
        return addresses.target_of(url, hosts, allow_http=allow_http)


def require_hosts(hosts: AllowedHosts) -> None:
    """Refuse every address where the operator allows no host.

    Raises:
        FetchRefused: `hosts` is empty.
    """
    if not hosts:
        raise FetchRefused("this server fetches no addresses; send the raster itself (data_format b64_json)")


@contextlib.contextmanager
def fetch_errors() -> Iterator[None]:
    """Translate errors of `baton_fetch` into this plugin's."""
    try:
        yield
    except FetchRefused as error:
        raise SourceRefused(f"{FIELD}: {error.reason}", param=FIELD) from None
    except FetchFailed as error:
        raise SourceFailed(f"{FIELD}: {error.reason}", param=FIELD) from None


__all__ = ["Target", "allowed_hosts", "fetch_errors", "is_public", "require_hosts", "target_of"]
