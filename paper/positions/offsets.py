"""Relative position: the matrix M_k of an offset, dot products, and a query turned by M_k."""

from ... import sinusoidal_encoding
from .. import positional_encoding as encodings
from ..study import Section
from . import pictures

OFFSETS = (1, 2, 5, 10, 50)
DIRECTION = 5
SMALL_WIDTH = 16


def offset_maps(num_positions: int, d_model: int, base: float) -> Section:
    """The matrix that moves every position by k.

    Args:
        num_positions: To check.
        d_model: Width.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    rows = []
    for offset in OFFSETS:
        encoding = sinusoidal_encoding(num_positions + offset, d_model, base).double()
        now, later = encoding[:num_positions], encoding[offset:]
        forward, back = (encodings.offset_map(k, d_model, base) for k in (offset, -offset))
        rows.append(
            [
                offset,
                (now @ forward.T - later).abs().max().item(),
                (later @ back.T - now).abs().max().item(),
                (forward - back).abs().max().item(),
            ]
        )
    worst = max(max(row[1:3]) for row in rows)
    return Section(
        name="offset-maps",
        title="Relative position: one matrix moves every position by k",
        says="M_k turns each pair by its own angle w_i k, so that PE(pos + k) = M_k PE(pos). One "
        f"matrix does it for all of {num_positions} positions: the largest error is {worst:.0e}, "
        "which is rounding. M_-k, its transpose, turns back. Attention compares positions through "
        'matrices it learns, and so can learn to look "k words on" wherever it stands.',
        columns=(
            "k",
            "|PE(pos + k) - M_k PE(pos)|",
            "|PE(pos) - M_-k PE(pos + k)|",
            "|M_k - M_-k|",
        ),
        rows=rows,
        figure=pictures.draw_offset_maps((1, DIRECTION, -DIRECTION), SMALL_WIDTH, base),
    )


def dot_products(num_positions: int, d_model: int, base: float) -> Section:
    """The dot product of two positions depends on their distance alone.

    Args:
        num_positions: To check.
        d_model: Width.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    encoding = sinusoidal_encoding(num_positions, d_model, base)
    exact = encoding.double()
    means, lowest, highest = encodings.by_offset(exact @ exact.T)
    offsets = [k for k in (0, *OFFSETS) if k < num_positions]
    formula = encodings.dot_product_by_offset(offsets, d_model, base).tolist()
    mirrored = encodings.dot_product_by_offset([-k for k in offsets], d_model, base).tolist()
    rows = [
        [k, forward, backward, means[k].item(), (highest[k] - lowest[k]).item()]
        for k, forward, backward in zip(offsets, formula, mirrored, strict=True)
    ]
    spread = (highest - lowest).max().item()
    return Section(
        name="dot-product",
        title="The dot product knows the distance",
        says="PE(pos) . PE(pos + k) is the sum of cos(w_i k) over the pairs, in which pos does not "
        f"occur: over all of {num_positions} positions it varies by {spread:.0e}. At k = 0 it is "
        f"d_model / 2 = {d_model / 2:g}, and it is the same to both sides, because a cosine is the "
        "same for k and -k. So by itself it tells of the distance of two words, and not which of "
        "them is first.",
        columns=("k", "sum of cos(w_i k)", "at -k", "mean of PE . PE", "largest - smallest"),
        rows=rows,
        figure=pictures.draw_dot_product(encoding),
    )


def direction(num_positions: int, d_model: int, base: float) -> Section:
    """M_k tells before from after.

    Args:
        num_positions: To look at.
        d_model: Width.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    encoding = sinusoidal_encoding(num_positions, d_model, base).double()
    position = num_positions // 2
    offset = min(DIRECTION, num_positions - 1 - position)
    scores = {
        k: encoding @ (encodings.offset_map(k, d_model, base) @ encoding[position])
        for k in (-offset, 0, offset)
    }
    rows = [
        [
            k,
            values.argmax().item(),
            values[position - offset].item(),
            values[position].item(),
            values[position + offset].item(),
        ]
        for k, values in scores.items()
    ]
    return Section(
        name="direction",
        title="What knows the direction is M_k",
        says=f"A query at position {position} that is its own encoding fits position {rows[1][1]} "
        f"best, and those before and after it equally. Turned by M_k it fits position {rows[2][1]} "
        f"best for k = {offset}, and {rows[0][1]} for k = {-offset}. W^Q and W^K of an attention "
        "head can hold such a turn: that is how a head comes to look at the word before, or the "
        "word after.",
        columns=(
            "k",
            "best position",
            f"score at {position - offset}",
            f"at {position}",
            f"at {position + offset}",
        ),
        rows=rows,
        figure=pictures.draw_directions(scores, position),
    )
