"""Define the errors of baton_geo, with their HTTP status and code.

    GeoError(ValueError)
    ├── RequestInvalid         400 invalid_request      a field of the request is wrong
    ├── NotARaster             415 raster_unsupported   the bytes are no GeoTIFF, JPEG 2000, PNG or JPEG
    ├── RasterBroken           400 raster_broken        the raster is damaged or truncated
    ├── RasterTooLarge         413 raster_too_large     more pixels, bands or tiles than the limits allow
    ├── RasterUnusable         422 raster_unusable      the raster is readable, but the model cannot use it
    ├── SourceRefused          400 source_refused       an address or a path the operator does not allow
    ├── SourceFailed           422 source_failed        an allowed address or path that could not be read
    └── DecoderBusy            503 decoder_busy         every decoder is at work (retryable)

They are `ValueError`s, so that plain vLLM answers 400; Baton's gateway reads `status` and `code`. Messages
are written for the person who made the raster, and contain no path, address or class name of the server.
"""

from __future__ import annotations

from typing import ClassVar


class GeoError(ValueError):
    """The base class of baton_geo's errors.

    Args:
        message: what is wrong, where, and what to do; sent to the client unchanged.
    """

    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestInvalid(GeoError):
    pass


class NotARaster(GeoError):
    status = 415
    code = "raster_unsupported"


class RasterBroken(GeoError):
    code = "raster_broken"


class RasterTooLarge(GeoError):
    status = 413
    code = "raster_too_large"


class RasterUnusable(GeoError):
    status = 422
    code = "raster_unusable"


class SourceRefused(GeoError):
    code = "source_refused"


class SourceFailed(GeoError):
    status = 422
    code = "source_failed"


class DecoderBusy(GeoError):
    status = 503
    code = "decoder_busy"
