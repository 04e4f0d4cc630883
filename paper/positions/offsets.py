"""Sections about relative position: the matrix M_k of an offset, dot products, rotated queries."""

from ... import sinusoidal_encoding
from .. import positional_encoding as encodings
from ..study import Section
from . import pictures

TABLE_OFFSETS = (1, 2, 5, 10, 50)
SHOWN_OFFSET = 5
SMALL_WIDTH = 16


def offset_maps(num_positions: int, d_model: int, base: float) -> Section:
    """Check the matrix that moves every position by k.

    Args:
        num_positions: Number of positions to check.
        d_model: Width.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    rows: list[list[float]] = []
    errors: list[float] = []
    for offset in TABLE_OFFSETS:
        encoding = sinusoidal_encoding(num_positions + offset, d_model, base).double()
        start, shifted = encoding[:num_positions], encoding[offset:]
        forward_map, backward_map = (
            encodings.offset_map(k, d_model, base) for k in (offset, -offset)
        )
        forward_error = (start @ forward_map.T - shifted).abs().max().item()
        backward_error = (shifted @ backward_map.T - start).abs().max().item()
        map_difference = (forward_map - backward_map).abs().max().item()
        rows.append([offset, forward_error, backward_error, map_difference])
        errors += [forward_error, backward_error]
    largest_error = max(errors)
    return Section(
        name="offset-maps",
        title="Relative position: one matrix moves every position by k",
        finding="M_k rotates each pair by its own angle w_i k, so PE(pos + k) = M_k PE(pos). The "
        f"same matrix works for all {num_positions} positions, up to rounding: the largest error "
        f"is {largest_error:.0e}. M_-k, its transpose, is the inverse rotation. Attention compares "
        'positions through learned matrices, so a head can learn to attend "k words later" at '
        "every position.",
        columns=(
            "k",
            "|PE(pos + k) - M_k PE(pos)|",
            "|PE(pos) - M_-k PE(pos + k)|",
            "|M_k - M_-k|",
        ),
        rows=rows,
        figure=pictures.draw_offset_maps((1, SHOWN_OFFSET, -SHOWN_OFFSET), SMALL_WIDTH, base),
    )


def dot_products(num_positions: int, d_model: int, base: float) -> Section:
    """Check that the dot product of two positions depends only on their distance.

    Args:
        num_positions: Number of positions to check.
        d_model: Width.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    encoding = sinusoidal_encoding(num_positions, d_model, base)
    double_encoding = encoding.double()
    means, lowest, highest = encodings.by_offset(double_encoding @ double_encoding.T)
    offsets = [k for k in (0, *TABLE_OFFSETS) if k < num_positions]
    formula_products = encodings.dot_product_by_offset(offsets, d_model, base).tolist()
    backward_products = encodings.dot_product_by_offset(
        [-k for k in offsets], d_model, base
    ).tolist()
    rows = [
        [k, forward, backward, means[k].item(), (highest[k] - lowest[k]).item()]
        for k, forward, backward in zip(offsets, formula_products, backward_products, strict=True)
    ]
    largest_variation = (highest - lowest).max().item()
    return Section(
        name="dot-product",
        title="The dot product depends only on the distance",
        finding="PE(pos) . PE(pos + k) is the sum of cos(w_i k) over the pairs, which does not "
        f"depend on pos: over all {num_positions} positions it varies by {largest_variation:.0e}. "
        f"At k = 0 it is d_model / 2 = {d_model / 2:g}. It is the same in both directions, because "
        "cos(x) = cos(-x). So the dot product contains the distance of two words, but not their "
        "order.",
        columns=("k", "sum of cos(w_i k)", "for -k", "mean of PE . PE", "largest - smallest"),
        rows=rows,
        figure=pictures.draw_dot_product(encoding),
    )


def direction(num_positions: int, d_model: int, base: float) -> Section:
    """Rotate a query by M_k, and find the position with the highest score.

    Args:
        num_positions: Number of positions.
        d_model: Width.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    encoding = sinusoidal_encoding(num_positions, d_model, base).double()
    position = num_positions // 2
    offset = min(SHOWN_OFFSET, num_positions - 1 - position)
    scores = {
        k: encoding @ (encodings.offset_map(k, d_model, base) @ encoding[position])
        for k in (-offset, 0, offset)
    }
    best_positions = {k: query_scores.argmax().item() for k, query_scores in scores.items()}
    rows = [
        [
            k,
            best_positions[k],
            query_scores[position - offset].item(),
            query_scores[position].item(),
            query_scores[position + offset].item(),
        ]
        for k, query_scores in scores.items()
    ]
    return Section(
        name="direction",
        title="M_k contains the direction",
        finding=f"A query equal to the encoding of position {position} has its highest score at "
        f"position {best_positions[0]}, and equal scores before and after it. Rotated by M_k, it "
        f"has its highest score at position {best_positions[offset]} for k = {offset}, and at "
        f"{best_positions[-offset]} for k = {-offset}. W^Q and W^K of a head can contain such a "
        "rotation, so a head can attend to the previous word or to the next one.",
        columns=(
            "k",
            "best position",
            f"score at {position - offset}",
            f"at {position}",
            f"at {position + offset}",
        ),
        rows=rows,
        figure=pictures.draw_directions(scores, position),
        message=f"M_k moves the best match of the query by k positions (d_model = {d_model})",
    )
