"""Every error that can be answered, read off the tree."""

from __future__ import annotations

from collections.abc import Iterator

from baton import errors


def tree(root: type[errors.BatonError]) -> Iterator[type[errors.BatonError]]:
    for child in root.__subclasses__():
        yield child
        yield from tree(child)


ANSWERED = [
    cls
    for cls in tree(errors.BatonError)
    if not issubclass(cls, errors.OperatorError) and cls not in (errors.ClientError, errors.ServerError)
]
