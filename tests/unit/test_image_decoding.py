"""Decoding an image: what is taken as it is, what is written anew, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops
from support import image_files

from baton.config.groups import ImageSettings
from baton.errors import ImageTooLarge, InvalidImage
from baton.images.decoding import decode_image
from baton.images.image import ClientImage
from baton.images.reader import decoded_url

LIMITS = ImageSettings()
WHERE = "messages[2].content[1].image_url"


def read(data: bytes, **limits: Any) -> ClientImage:
    return decode_image(data, ImageSettings(**limits), WHERE)


def refused(data: bytes, **limits: Any) -> InvalidImage:
    with pytest.raises(InvalidImage) as caught:
        read(data, **limits)
    assert caught.value.param == WHERE
    assert caught.value.message.startswith(WHERE)
    assert caught.value.message.isprintable()
    return caught.value


PLAIN = [
    *(("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
    *(("JPEG", mode) for mode in ("L", "RGB")),
    *(("WEBP", mode) for mode in ("RGB", "RGBA")),
    *(("GIF", mode) for mode in ("L", "P", "RGB")),
]


@pytest.mark.parametrize(("kind", "mode"), PLAIN)
def test_a_plain_upright_image_goes_on_as_it_came(kind: str, mode: str) -> None:
    """Nothing is decoded and encoded again that need not be: the bytes are the client's."""
    data = image_files.file_of(image_files.image(mode=mode), kind)
    picture = read(data)
    assert picture.data is data
    assert (picture.width, picture.height, picture.media_type) == (24, 16, f"image/{kind.lower()}")


def test_the_digest_names_the_bytes_and_the_url_holds_them() -> None:
    """Another file is another name, also where the pixels are the same."""
    one, other = (
        read(image_files.file_of(image_files.image())),
        read(image_files.file_of(image_files.image(), "GIF")),
    )
    assert one.digest != other.digest
    assert len(one.digest) == 64
    assert one.url == image_files.url_of(one.data)
    assert decoded_url(one.url, LIMITS, WHERE) == one.data


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied_and_forgotten(kind: str, orientation: int) -> None:
    """What comes out must be what a person sees who opens the file, to within JPEG's loss."""
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    wanted = image_files.image()
    if orientation != 1:
        wanted = wanted.transpose(turns[orientation])
    data = image_files.oriented(orientation, kind)
    picture = read(data)
    found = image_files.opened(picture.data)
    assert (picture.data is data) == (orientation == 1)
    assert found.getexif().get(0x0112, 1) == 1
    assert found.size == wanted.size == (picture.width, picture.height)
    assert max(high for _, high in ImageChops.difference(found.convert("RGB"), wanted).getextrema()) <= 12


@pytest.mark.parametrize("said", [0, 9, 77])
def test_an_orientation_that_is_none_is_nobodys_to_apply(said: int) -> None:
    """EXIF knows eight."""
    data = image_files.oriented(said)
    assert read(data).data is data


def test_cmyk_becomes_rgb() -> None:
    """Printers' inks are no screen's colours, and processors do not know them."""
    picture = read(image_files.file_of(Image.new("CMYK", (24, 16), (0, 255, 255, 0)), "JPEG", quality=95))
    red, green, blue = image_files.opened(picture.data).getpixel((3, 3))  # type: ignore[misc]
    assert (red > 240, green < 15, blue < 15, picture.media_type) == (True, True, True, "image/jpeg")


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    """A ramp of 16 bits stays a ramp; clipped, nearly all of it would be white."""
    ramp = np.linspace(0, 65535, 24 * 16).astype(np.uint16).reshape(16, 24)
    found = np.asarray(image_files.opened(read(image_files.file_of(Image.fromarray(ramp))).data)).astype(int)
    assert found.dtype == np.dtype(int)
    assert np.abs(found - ramp / 257).max() <= 1


def test_transparency_without_an_alpha_channel_gets_one() -> None:
    """A palette's transparent entry must stay transparent, and not become whatever colour it has."""
    made = image_files.image(mode="P")
    picture = read(image_files.file_of(made, "PNG", transparency=made.getpixel((0, 0))))
    found = image_files.opened(picture.data)
    assert found.mode == "RGBA"
    assert found.getpixel((0, 0))[3] == 0  # type: ignore[index]
    assert found.getpixel((23, 0))[3] == 255  # type: ignore[index]


def test_a_phone_s_jpeg_with_a_second_picture_is_its_first() -> None:
    """Two pictures in one JPEG are no animation."""
    data = image_files.two_pictures_in_one()
    assert (read(data).data is data, read(data).width, read(data).media_type) == (True, 24, "image/jpeg")


@pytest.mark.parametrize("name", sorted(image_files.DISGUISED))
def test_what_is_no_image_is_refused_whatever_it_is_called(name: str) -> None:
    """The bytes count."""
    assert refused(image_files.DISGUISED[name]).code == "invalid_image"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_animated_files_are_refused(kind: str) -> None:
    """One of its frames would be looked at, and nobody would know which."""
    assert "animated" in refused(image_files.animated(kind)).message


@pytest.mark.parametrize(
    ("size", "code", "said"),
    [
        ((1, 1), "invalid_image", "at least 4"),
        ((1, 65_000), "image_too_large", "16384 a side"),
        ((65_000, 1), "image_too_large", "16384 a side"),
        ((3, 50), "invalid_image", "at least 4"),
        ((4, 404), "invalid_image", "100 times"),
        ((5001, 5000), "image_too_large", "25000000 in all"),
    ],
)
def test_sizes_no_model_was_made_for(size: tuple[int, int], code: str, said: str) -> None:
    """Each is refused by what the file says of itself: there are no pixels in these."""
    error = refused(image_files.png(*size))
    assert (error.code, said in error.message) == (code, True)
    assert f"{size[0]}x{size[1]}" in error.message


def test_limits_are_taken_to_the_pixel() -> None:
    """What is just allowed is read, one more is not."""
    data = image_files.file_of(image_files.image(24, 16))
    assert read(data, pixels=24 * 16, side_max=24, side_min=16).data is data
    assert refused(data, pixels=24 * 16 - 1).code == "image_too_large"
    assert refused(data, side_max=23).code == "image_too_large"
    assert refused(data, side_min=17).code == "invalid_image"
    padded = data + bytes(2000)
    assert read(padded, file_bytes=len(padded)).data is padded
    assert refused(padded, file_bytes=len(padded) - 1).code == "image_too_large"


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    """65500 x 65500 pixels in a few KB, and sizes past all counting."""
    for width, height in ((65_500, 65_500), (2**31 - 1, 2**31 - 1)):
        error = refused(image_files.png(width, height, image_files.chunk(b"IDAT", b"x" * 100)))
        assert isinstance(error, ImageTooLarge)


@pytest.mark.parametrize("made", [image_files.text_bomb, image_files.profile_bomb])
def test_what_is_packed_beside_the_pixels_is_not_unpacked_without_end(made: Any) -> None:
    """64 MiB of text or profile in 64 KiB."""
    data = made()
    assert len(data) < 200_000
    assert refused(data).code == "invalid_image"


@pytest.mark.parametrize(
    ("made", "few", "many"),
    [
        (image_files.many_chunks, 1000, 5000),
        (image_files.many_pixel_chunks, 10_000, 50_000),
        (image_files.many_segments, 1000, 5000),
        (image_files.many_extensions, 1000, 5000),
        (image_files.many_scans, 20, 5000),
    ],
)
def test_a_file_of_endless_small_parts_is_refused(made: Any, few: int, many: int) -> None:
    """Reading them would be the attack; as many as files really have are taken."""
    assert read(made(few)).width == 24
    assert "too many parts" in refused(made(many)).message


@pytest.mark.parametrize("kind", image_files.FORMATS)
def test_a_file_cut_short_loses_no_pixel_unnoticed(kind: str) -> None:
    """Wherever it is cut, it is refused, or every pixel is still there."""
    whole = image_files.file_of(image_files.image(), kind)
    wanted = image_files.opened(whole).convert("RGBA")
    for length in range(len(whole)):
        try:
            found = image_files.opened(read(whole[:length]).data).convert("RGBA")
        except InvalidImage:
            continue
        assert found.tobytes() == wanted.tobytes(), length


FILES = [
    *(image_files.file_of(image_files.image(), kind) for kind in image_files.FORMATS),
    image_files.file_of(image_files.image(), "JPEG", progressive=True),
    image_files.file_of(image_files.image(mode="P"), "PNG", transparency=0),
    image_files.oriented(6),
    image_files.two_pictures_in_one(),
    image_files.animated("GIF"),
    image_files.animated("WEBP"),
    image_files.animated("PNG"),
]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_file_raises_anything_but_our_errors(data: st.DataObject) -> None:
    """Bytes changed, left out, doubled: it is read within the limits, or refused in our words."""
    file = bytearray(data.draw(st.sampled_from(FILES)))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(file) - 1))
        cut = data.draw(st.integers(0, 9))
        file[at : at + cut] = data.draw(st.binary(max_size=9))
        if not file:
            break
    try:
        picture = read(bytes(file), pixels=100_000)
    except InvalidImage:
        return
    assert picture.width * picture.height <= 100_000
    assert min(picture.width, picture.height) >= 4
    assert image_files.opened(picture.data).size == (picture.width, picture.height)


@pytest.mark.fault("F8")
def test_a_lossy_webp_that_is_turned_upright_does_not_grow_many_times() -> None:
    """As a PNG it would: pixels that were lossy stay about as large as a JPEG."""
    sent = image_files.photo(900, 600, "WEBP", lossless=False, quality=70)
    lossless = image_files.photo(900, 600, "WEBP", lossless=True)
    assert read(sent).media_type == "image/jpeg"
    assert len(read(sent).data) < 4 * len(sent)
    assert read(lossless).media_type == "image/png"
    shown = np.asarray(image_files.opened(read(sent).data).convert("RGB"), np.int16)
    wanted = np.asarray(
        image_files.opened(sent).transpose(Image.Transpose.ROTATE_270).convert("RGB"), np.int16
    )
    assert np.abs(shown - wanted).mean() < 3


@pytest.mark.fault("F8")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_is_held_to_its_limit_again_after_it_was_rewritten(kind: str) -> None:
    options = {"JPEG": {"quality": 5}, "WEBP": {"lossless": False, "quality": 5}}.get(
        kind, {"optimize": True}
    )
    sent = image_files.photo(300, 200, kind, **options)
    written = len(read(sent).data)
    assert written > len(sent), "the test wants one that grows"
    assert len(read(sent, file_bytes=written).data) == written
    told = refused(sent, file_bytes=written - 1)
    assert told.code == "image_too_large"
    assert "images.file_bytes" in told.message
    assert "upright" in told.message
