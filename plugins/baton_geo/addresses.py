"""Which addresses may be fetched, as `baton_fetch` says, in this plugin's words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from baton_fetch import addresses
from baton_fetch.addresses import Target, is_public
from baton_fetch.errors import FetchFailed, FetchRefused
from baton_geo.errors import SourceFailed, SourceRefused

FIELD = "data.data"


class AllowedHosts(addresses.AllowedHosts):
    """The operator's list, `baton_geo.allowed_hosts`.

    Raises:
        ValueError: an entry that is no host.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        super().__init__(entries, "baton_geo.allowed_hosts")


def target_of(url: str, hosts: AllowedHosts, *, allow_http: bool) -> Target:
    """Takes a client's address apart.

    Raises:
        SourceRefused: it is not written in the one way we take, or the operator's list does not hold it.
    """
    with said():
        require_hosts(hosts)
        return addresses.target_of(url, hosts, allow_http=allow_http)


def require_hosts(hosts: AllowedHosts) -> None:
    """Say what to send instead where nothing is fetched.

    Raises:
        FetchRefused: the operator lists no host.
    """
    if not hosts:
        raise FetchRefused("this server fetches no addresses; send the raster itself (data_format b64_json)")


@contextlib.contextmanager
def said() -> Iterator[None]:
    """Why nothing is fetched, as errors of this plugin."""
    try:
        yield
    except FetchRefused as error:
        raise SourceRefused(f"{FIELD}: {error.reason}", param=FIELD) from None
    except FetchFailed as error:
        raise SourceFailed(f"{FIELD}: {error.reason}", param=FIELD) from None


__all__ = ["AllowedHosts", "Target", "is_public", "require_hosts", "said", "target_of"]
