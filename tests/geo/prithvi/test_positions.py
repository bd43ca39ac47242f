"""Position tables and coordinate encodings against the formulas, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baton_geo.prithvi.encoder import CoordinateEncoder, grid_positions, resized_positions


def waves(dim: int, value: float) -> list[float]:
    """Sines, then cosines, of one value, in plain Python."""
    angles = [value / 10000 ** (2 * step / dim) for step in range(dim // 2)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


def test_a_token_says_column_row_and_time() -> None:
    """Each patch's position must be its column, row and time step in 6, 6 and 4 sixteenths of the width."""
    dim, (times, rows, columns) = 32, (2, 3, 5)
    table = grid_positions(dim, (times, rows, columns))
    assert table.shape == (1, 1 + times * rows * columns, dim)
    assert table.dtype == torch.float32
    assert not table[0, 0].any()
    place = 1
    for time in range(times):
        for row in range(rows):
            for column in range(columns):
                expected = waves(12, column) + waves(12, row) + waves(8, time)
                assert table[0, place].tolist() == pytest.approx(expected, abs=1e-6)
                place += 1


def coordinate_table(grid: tuple[int, int, int]) -> Tensor:
    """A table whose numbers are row and column, so that interpolating it can be done by hand."""
    times, rows, columns = grid
    table = torch.zeros(times, rows, columns, 16)
    table[..., 0] = torch.arange(rows, dtype=torch.float32)[None, :, None]
    table[..., 1] = torch.arange(columns, dtype=torch.float32)[None, None, :]
    table[..., 2] = torch.arange(times, dtype=torch.float32)[:, None, None]
    return torch.cat((torch.full((1, 1, 16), 7.0), table.reshape(1, -1, 16)), dim=1)


def test_interpolation_keeps_corners_and_times() -> None:
    """Corner patches must keep their positions, time steps must not mix, the class token must stay."""
    wanted = (3, 7, 10)
    wide = resized_positions(coordinate_table((3, 4, 4)), (3, 4, 4), wanted)
    assert wide.shape == (1, 1 + 3 * 7 * 10, 16)
    assert wide[0, 0].eq(7).all()
    patches = wide[0, 1:].reshape(*wanted, 16)
    assert torch.allclose(patches[:, 0, :, 0], torch.zeros(3, 10), atol=1e-5)
    assert torch.allclose(patches[:, -1, :, 0], torch.full((3, 10), 3.0), atol=1e-5)
    assert torch.allclose(patches[:, :, -1, 1], torch.full((3, 7), 3.0), atol=1e-5)
    assert torch.allclose(patches[..., 2], torch.arange(3.0)[:, None, None].expand(3, 7, 10), atol=1e-5)


def test_the_same_grid_is_not_touched() -> None:
    """A table of the wanted grid must come back as it is, even if its numbers are not the formula's."""
    table = coordinate_table((1, 4, 4))
    assert resized_positions(table, (1, 4, 4), (1, 4, 4)) is table


def test_interpolating_a_half_precision_table_gives_float32() -> None:
    """A table in bfloat16 must be interpolated in float32."""
    half = grid_positions(32, (1, 4, 4)).bfloat16()
    wide = resized_positions(half, (1, 4, 4), (1, 6, 6))
    assert wide.dtype == torch.float32
    exact = resized_positions(half.float(), (1, 4, 4), (1, 6, 6))
    assert torch.equal(wide, exact)


def test_an_encoder_of_coordinates_scales_both_halves() -> None:
    """A date must be the waves of its year, then of its day, each half a token, times the scale."""
    encoder = CoordinateEncoder(16, learned_scale=True)
    with torch.no_grad():
        encoder.scale.fill_(0.5)
    given = encoder(torch.tensor([[[2021.0, 45.0], [2022.0, 300.0]]]))
    assert given.shape == (1, 2, 16)
    expected = [0.5 * wave for wave in waves(8, 2022.0) + waves(8, 300.0)]
    # float32 knows 2022 times a frequency to about 1e-4.
    assert given[0, 1].tolist() == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("learned", [True, False])
def test_only_a_learned_scale_is_a_parameter(learned: bool) -> None:
    """The scale must be trained only where the configuration says so, and be in the checkpoint either way."""
    encoder = CoordinateEncoder(16, learned_scale=learned)
    assert len(list(encoder.parameters())) == int(learned)
    assert list(encoder.state_dict()) == ["scale"]
    assert encoder.scale.item() == pytest.approx(0.1 if learned else 1.0)


def test_years_stay_apart_in_half_precision() -> None:
    """A bfloat16 model must still tell 2021 from 2022, which bfloat16 itself cannot."""
    encoder = CoordinateEncoder(16, learned_scale=False).bfloat16()
    dates = torch.tensor([[[2021.0, 45.0], [2022.0, 45.0]]])
    assert dates.bfloat16()[0, 0, 0] == dates.bfloat16()[0, 1, 0]
    given = encoder(dates)
    assert (given[0, 0] - given[0, 1]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_coordinates_of_any_dtype_are_encoded_in_float32(dtype: torch.dtype) -> None:
    """Dates given as integers or doubles must be encoded as the same dates in float32 are."""
    encoder = CoordinateEncoder(16, learned_scale=False)
    dates = torch.tensor([[[2021, 45]]])
    given = encoder(dates.to(dtype))
    assert given.dtype == torch.float32
    assert torch.equal(given, encoder(dates.float()))
