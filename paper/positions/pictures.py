"""Pictures of section 3.5, drawn from the results of `positional_encoding`.

Shapes: N positions, d features of an encoding.
"""

import textwrap
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...drawing import new_figure, write_message
from ..positional_encoding import (
    DECIDING_NUMBERS,
    LEAST_DISTANCE,
    PROPERTIES,
    Measurement,
    Overlap,
    Repeat,
    by_offset,
    cosine_similarity_matrix,
    first_repeat,
    median_step,
    offset_map,
    wavelengths,
)
from ..study import join_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNED_COLORMAP = "RdBu_r"
HOLDS_COLOR, FAILS_COLOR = (0.81, 0.91, 0.81), (0.96, 0.81, 0.79)
# ticks of the logarithmic axis for shares of energy and |cosine|
SHARE_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# an encoding of at most this many features is drawn as lines
MAX_LINE_FEATURES = 2
TITLE_SIZE = 11
# text below the name of each candidate in the picture of the candidates
CANDIDATE_NOTES = {
    "integer": "pos",
    "fraction": "(pos + 1) / length",
    "sine": "sin(pos)",
    "sine and cosine": "sin(pos), cos(pos)",
    "pairs": "wavelengths 2π, 4π, ...: each 2π longer",
    "binary": "bits of pos, lowest bit first",
    "sinusoidal": "geometric wavelengths, section 3.5",
    "learned": "initial values of a learned table",
}


def draw_heatmap(encoding: Tensor) -> "Figure":
    """Draw an encoding as a heatmap: a row for each position, a column for each feature.

    Args:
        encoding: Encoding of the positions, [N, d].

    Returns:
        The picture.
    """
    figure, axes = new_figure(8.0, 4.4)
    image = _plot_heatmap(axes, encoding)
    figure.colorbar(image, ax=axes, label="value")
    return figure


def draw_similarity(encoding: Tensor) -> "Figure":
    """Draw the cosine similarity of every two positions.

    Args:
        encoding: Encoding of the positions, [N, d].

    Returns:
        The picture.
    """
    figure, axes = new_figure(5.4, 4.4)
    # the plot is square and the figure is not: keep the colour bar next to the plot
    figure.set_layout_engine("compressed")
    image = _plot_similarity(axes, encoding)
    figure.colorbar(image, ax=axes, label="cosine similarity")
    return figure


def draw_dot_product(encoding: Tensor) -> "Figure":
    """Draw the dot product of two positions against their distance, in both directions.

    If the dot product also depends on the position, a band shows its range at each distance.

    Args:
        encoding: Encoding of the positions, [N, d].

    Returns:
        The picture.
    """
    encoding = encoding.double()
    means, lowest, highest = by_offset(encoding @ encoding.T)  # [N] each
    offsets = range(1 - len(means), len(means))

    def mirror(values: Tensor) -> Tensor:
        return torch.cat((values.flip(0), values[1:]))

    figure, axes = new_figure(7.0, 3.8)
    # the dot product of sinusoids is at most d / 2, so a band of d / 1000 is too thin to be seen
    is_thin = bool((highest - lowest).max() < 1e-3 * encoding.shape[1])
    band = mirror(lowest), mirror(highest)
    axes.fill_between(offsets, *band, alpha=0.3, label="smallest to largest")
    axes.plot(offsets, mirror(means), label="mean over positions")
    axes.set_xlabel("distance k, in positions")
    axes.set_ylabel("PE(pos) · PE(pos + k)")
    axes.set_ylim(bottom=min(0.0, float(lowest.min())))
    axes.grid(alpha=0.3)
    if is_thin:
        dependence = "only on their distance"
    else:
        dependence = "on their distance and on the position"
        axes.legend()
    width_note = f"d_model = {encoding.shape[1]}"
    write_message(figure, f"The dot product of two positions depends {dependence} ({width_note})")
    return figure


def draw_waves(
    d_model: int, num_positions: int, base: float, pairs: Sequence[int], words: Sequence[str] = ()
) -> "Figure":
    """Draw the sines of some pairs against the position, with dots at the words.

    Args:
        d_model: Width, even.
        num_positions: Number of positions N.
        base: Base of the wavelengths.
        pairs: Numbers i of the pairs to draw.
        words: Words at positions 0, 1, ...

    Returns:
        The picture.
    """
    figure, all_axes = new_figure(8.0, 1.2 + 1.0 * len(pairs), rows=len(pairs))
    all_axes = all_axes[:, 0] if len(pairs) > 1 else [all_axes]
    fine_positions = torch.linspace(0, num_positions - 1, 1000, dtype=torch.float64)
    positions = torch.arange(num_positions)
    lengths = wavelengths(d_model, base)
    for axes, pair in zip(all_axes, pairs, strict=True):
        frequency = 2 * torch.pi / lengths[pair]
        axes.plot(fine_positions, (fine_positions * frequency).sin(), color="C0", linewidth=1)
        axes.plot(positions, (positions * frequency).sin(), ".", color="C0", markersize=4)
        for position, _ in enumerate(words):
            axes.plot(position, (position * frequency).sin(), "o", color="C3", markersize=6)
        axes.set_ylim(-1.3, 1.3)
        axes.set_yticks([-1, 0, 1])
        axes.grid(alpha=0.3)
        axes.set_title(
            f"feature {2 * pair}: sine of wavelength {lengths[pair]:,.1f} positions",
            fontsize=9,
            loc="left",
        )
        if axes is not all_axes[-1]:
            axes.set_xticklabels([])
    all_axes[-1].set_xlabel("position" + (f" (red: {', '.join(words)})" if words else ""))
    figure.supylabel("value of the feature", fontsize="medium")
    write_message(
        figure,
        f"Each wavelength is {base ** (2 / d_model):.4g} times the one before: {len(pairs)} of the "
        f"{len(lengths)} pairs, d_model = {d_model}, base {base:,g}",
    )
    return figure


def draw_values(encoding: Tensor, words: Sequence[str]) -> "Figure":
    """Draw a small encoding as a heatmap with its numbers.

    Args:
        encoding: Encoding of few positions, [N, d].
        words: Words at the N positions.

    Returns:
        The picture.
    """
    figure, axes = new_figure(1.8 + 0.8 * encoding.shape[1], 1.3 + 0.5 * len(words))
    axes.imshow(encoding.numpy(), cmap=SIGNED_COLORMAP, vmin=-1, vmax=1, aspect="auto")
    for row, values in enumerate(encoding.tolist()):
        for column, value in enumerate(values):
            color = "white" if abs(value) > 0.6 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
    axes.set_yticks(range(len(words)), [f"{word}, pos {row}" for row, word in enumerate(words)])
    axes.set_xticks(
        range(encoding.shape[1]),
        [
            f"{'cos' if column % 2 else 'sin'}\n2i = {column // 2 * 2}"
            for column in range(encoding.shape[1])
        ],
    )
    write_message(
        figure,
        f"d_model = {encoding.shape[1]}: each pair of features is the sine and cosine of one angle",
    )
    return figure


def draw_bases(encodings: Mapping[float, Tensor]) -> "Figure":
    """Draw heatmaps above similarity matrices, a column for each base.

    Args:
        encodings: Encodings by base, [N, d] each.

    Returns:
        The picture.
    """
    figure, all_axes = new_figure(1.0 + 3.4 * len(encodings), 6.4, rows=2, columns=len(encodings))
    for (heatmap_axes, similarity_axes), (base, encoding) in zip(
        all_axes.T, encodings.items(), strict=True
    ):
        heatmap = _plot_heatmap(heatmap_axes, encoding)
        similarity_image = _plot_similarity(similarity_axes, encoding)
        repeat = first_repeat(encoding, LEAST_DISTANCE * median_step(encoding))
        if repeat is None:
            repeat_note = "all positions differ"
        else:
            repeat_note = f"positions {repeat.earlier} and {repeat.position} repeat"
        heatmap_axes.set_title(f"base {base:,g}: {repeat_note}", fontsize=TITLE_SIZE)
    figure.colorbar(heatmap, ax=all_axes[0], label="value")
    figure.colorbar(similarity_image, ax=all_axes[1], label="cosine similarity")
    write_message(
        figure,
        "The base decides which positions are similar: encoding above, cosine similarity of every "
        f"two positions below (d_model = {encoding.shape[1]})",
    )
    return figure


def draw_reach(curves: Mapping[float, Tensor]) -> "Figure":
    """Draw the cosine similarity of two positions against their distance, for each base.

    A dot marks the first distance at which the similarity is not positive.

    Args:
        curves: Similarities at the distances 1, 2, ... K, by base, [K] each.

    Returns:
        The picture.
    """
    figure, axes = new_figure(7.0, 4.0)
    for base, curve in curves.items():
        (line,) = axes.plot(range(1, len(curve) + 1), curve, linewidth=1)
        label = f"base {base:,g}: positive up to {len(curve):,}"
        zero_distance = next((k for k, value in enumerate(curve.tolist(), 1) if value <= 0), None)
        if zero_distance is not None:
            axes.plot(zero_distance, curve[zero_distance - 1], "o", color=line.get_color())
            label = f"base {base:,g}: no longer positive at {zero_distance:,} (dot)"
        line.set_label(label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(
        "distance, in positions (a curve with a dot ends at twice the distance of the dot)"
    )
    axes.set_ylabel("cosine similarity")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


def draw_candidates(
    encodings: Mapping[str, Tensor],
    shorter_encodings: Mapping[str, Tensor],
    repeats: Mapping[str, Repeat | None],
) -> "Figure":
    """Draw each candidate: narrow encodings as lines, wide ones as heatmaps.

    Args:
        encodings: Encodings by name, [N, d] each.
        shorter_encodings: Encodings of a shorter sentence by name, drawn beside the narrow ones.
        repeats: Two positions with the same encoding, or None, by name; drawn as dots.

    Returns:
        The picture.
    """
    columns = 3
    rows = -(-len(encodings) // columns)
    figure, all_axes = new_figure(10.0, 1.2 + 2.9 * rows, rows=rows, columns=columns)
    for axes in all_axes.flat[len(encodings) :]:
        axes.set_visible(False)
    # one colour scale for all heatmaps, because they share a colour bar
    largest_value = max(
        encoding.abs().max().item()
        for encoding in encodings.values()
        if encoding.shape[1] > MAX_LINE_FEATURES
    )
    for axes, (name, encoding) in zip(all_axes.flat, encodings.items(), strict=False):
        if encoding.shape[1] > MAX_LINE_FEATURES:
            image = _plot_heatmap(axes, encoding, largest_value)
        else:
            _plot_features(axes, encoding, shorter_encodings[name], repeats[name])
        axes.set_title(f"{name}\n{CANDIDATE_NOTES.get(name.lstrip('0123456789 '), '')}", fontsize=9)
    figure.colorbar(image, ax=all_axes, label="value, in the panels with colours", aspect=40)
    handles_by_label: dict[str, Any] = {}
    for axes in all_axes.flat:
        handles, labels = axes.get_legend_handles_labels()
        handles_by_label |= dict(zip(labels, handles, strict=True))
    # in alphabetical order, the features come first
    sorted_labels = sorted(handles_by_label)
    handles = [handles_by_label[name] for name in sorted_labels]
    figure.legend(
        handles, sorted_labels, loc="outside lower center", ncols=len(sorted_labels), fontsize=9
    )
    write_message(
        figure,
        "A single number for each position grows without bound, depends on the length of the "
        "sentence, or repeats",
    )
    return figure


def draw_properties(measurements: Mapping[str, Mapping[str, Measurement]]) -> "Figure":
    """Draw a table of the properties of each candidate, with the measured numbers.

    Args:
        measurements: Measurements by candidate and property.

    Returns:
        The picture.
    """
    figure, axes = new_figure(12.0, 1.8 + 0.5 * len(measurements))
    colors = [
        [HOLDS_COLOR if by_property[name].holds else FAILS_COLOR for name in PROPERTIES]
        for by_property in measurements.values()
    ]
    axes.imshow(colors, aspect="auto")
    for row, by_property in enumerate(measurements.values()):
        for column, name in enumerate(PROPERTIES):
            verdict = "yes" if by_property[name].holds else "no"
            text = f"{verdict}: {by_property[name].text}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    column_heads = [
        f"{name}\n{textwrap.fill(f'({DECIDING_NUMBERS[name]})', 22)}" for name in PROPERTIES
    ]
    axes.set_xticks(range(len(PROPERTIES)), column_heads, fontsize=8)
    axes.xaxis.tick_top()
    candidate_labels = [
        "learned\n(initial values)" if name == "learned" else name for name in measurements
    ]
    axes.set_yticks(range(len(measurements)), candidate_labels)
    axes.set_xticks([column + 0.5 for column in range(len(PROPERTIES) - 1)], minor=True)
    axes.set_yticks([row + 0.5 for row in range(len(measurements) - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    axes.set_xlabel(
        "yes or no, and the number in the head of the column; a step is the distance between the "
        "encodings of two neighbouring positions"
    )
    best_candidates = [
        name
        for name, by_property in measurements.items()
        if all(measurement.holds for measurement in by_property.values())
    ] or ["no candidate"]
    write_message(figure, f"All properties hold for {join_names(best_candidates)}")
    return figure


def draw_offset_maps(offsets: Sequence[int], d_model: int, base: float) -> "Figure":
    """Draw matrices M_k, which have a rotation for each pair along the diagonal.

    Args:
        offsets: Offsets k.
        d_model: Width, even and small.
        base: Base of the wavelengths.

    Returns:
        The picture.
    """
    figure, all_axes = new_figure(1.0 + 3.2 * len(offsets), 3.5, columns=len(offsets))
    for axes, offset in zip(all_axes[0], offsets, strict=True):
        image = axes.imshow(
            offset_map(offset, d_model, base).numpy(), cmap=SIGNED_COLORMAP, vmin=-1, vmax=1
        )
        axes.set_title(f"M_k, k = {offset:+d}", fontsize=10)
        axes.set_xlabel("feature of PE(pos)")
    all_axes[0, 0].set_ylabel("feature of PE(pos + k)")
    figure.colorbar(image, ax=all_axes[0], label="value of M_k")
    write_message(
        figure,
        "The matrix M_k moves a position by k: it rotates each pair of features by its own angle "
        f"times k (d_model = {d_model})",
    )
    return figure


def draw_directions(scores: Mapping[int, Tensor], position: int) -> "Figure":
    """Draw the scores of a query at one position with all positions, with and without M_k.

    Args:
        scores: Dot products of M_k PE(position) with the encoding of every position, by offset k,
            [N] each.
        position: Position of the query.

    Returns:
        The picture.
    """
    figure, axes = new_figure(7.0, 3.8)
    for offset, query_scores in scores.items():
        label = f"query rotated by M_k, k = {offset:+d}" if offset else "query not rotated"
        (line,) = axes.plot(query_scores, ".-", linewidth=1, markersize=4, label=label)
        best_position = int(query_scores.argmax())
        axes.plot(best_position, query_scores[best_position], "o", color=line.get_color())
    axes.axvline(position, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(
        f"position (dotted line: position {position} of the query; large dots: best match)"
    )
    axes.set_ylabel("dot product with the query")
    axes.set_ylim(bottom=min(0.0, *(float(query_scores.min()) for query_scores in scores.values())))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")
    return figure


def draw_bits(bits: Tensor, encoding: Tensor) -> "Figure":
    """Draw each bit of the position above a wave with the same period, and the sines below.

    Args:
        bits: Zeros and ones, lowest bit first, [N, n].
        encoding: Sinusoids with doubling wavelengths; only sines are drawn, [N, 2 n].

    Returns:
        The picture.
    """
    num_positions, num_bits = bits.shape
    figure, all_axes = new_figure(9.6, 2.4 + 0.9 * num_bits, rows=num_bits + 1)
    all_axes[0, 0].get_gridspec().set_height_ratios([1.0] * num_bits + [1.6])
    fine_positions = torch.linspace(-0.5, num_positions - 0.5, 2000)
    for bit, (axes, bit_values) in enumerate(zip(all_axes[:, 0], bits.T, strict=False)):
        period = 2 ** (bit + 1)
        # a bit is 1 in the second half of its period, so draw a negative sine
        axes.plot(
            fine_positions, -(2 * torch.pi * (fine_positions + 0.5) / period).sin(), linewidth=1
        )
        axes.axhline(0, color="black", linewidth=0.5)
        image_extent = (-0.5, num_positions - 0.5, 1.3, 2.9)
        image_style = {"cmap": "Greys", "vmin": 0, "vmax": 3, "aspect": "auto"}
        axes.imshow(
            bit_values[None].numpy(), extent=image_extent, interpolation="nearest", **image_style
        )
        for position, value in enumerate(bit_values.int().tolist()):
            axes.text(position, 2.1, value, ha="center", va="center", fontsize=7)
        axes.set_ylim(-1.3, 2.9)
        axes.set_yticks([0, 2.1], [f"wave of period {period}", f"bit {bit}"])
        axes.set_xticks([])
    sine_axes = all_axes[-1, 0]
    sines = encoding[:, ::2].T
    image = sine_axes.imshow(
        sines.numpy(), cmap=SIGNED_COLORMAP, vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
    )
    sine_axes.set_title(
        "sines of the encoding: wavelengths of π times the periods above", fontsize=9
    )
    sine_axes.set_yticks(range(num_bits), [f"pair {pair}" for pair in range(num_bits)])
    sine_axes.set_xlabel("position")
    figure.colorbar(image, ax=sine_axes, label="value")
    write_message(
        figure,
        "Each bit is 1 where a wave of the same period is positive: a sine is like a bit without "
        "jumps",
    )
    return figure


def draw_overlaps(overlaps: Mapping[int, Overlap]) -> "Figure":
    """Draw the overlap of words and positions against the width.

    Args:
        overlaps: Overlaps by width.

    Returns:
        The picture.
    """
    widths = list(overlaps)
    figure, all_axes = new_figure(10.0, 3.8, columns=2)
    energy_axes, angle_axes = all_axes[0]
    energy_axes.loglog(
        widths,
        [overlap.word_energy for overlap in overlaps.values()],
        "o-",
        label="energy of words along directions of positions",
    )
    energy_axes.loglog(
        widths,
        [overlap.mean_cosine for overlap in overlaps.values()],
        "s-",
        label="mean |cosine| of a word and a position",
    )
    energy_axes.set_yticks(SHARE_TICKS, [f"{share:g}" for share in SHARE_TICKS])
    energy_axes.set_ylabel("share of energy, or |cosine|")
    angle_axes.semilogx(
        widths,
        [overlap.mean_angle for overlap in overlaps.values()],
        "o-",
        label="mean principal angle",
    )
    angle_axes.semilogx(
        widths,
        [overlap.smallest_angle for overlap in overlaps.values()],
        "s-",
        label="smallest principal angle",
    )
    angle_axes.axhline(
        90, color="black", linewidth=0.8, linestyle=":", label="90 degrees: no overlap"
    )
    angle_axes.set_ylabel("principal angle, degrees")
    direction_counts = [overlap.num_directions for overlap in overlaps.values()]
    angle_axes.set_title(
        f"subspaces: the {min(direction_counts)} to {max(direction_counts)} strongest directions "
        "of the words\nand the same number of strongest directions of the positions",
        fontsize=9,
    )
    energy_axes.set_title("energy is squared length", fontsize=9)
    for axes in all_axes[0]:
        axes.set_xticks(widths, widths)
        axes.minorticks_off()
        axes.set_xlabel("d_model")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    write_message(figure, "Random words and positions overlap less in wider embeddings")
    return figure


def draw_two_orders(
    word_vectors: Mapping[str, tuple[Tensor, Tensor]],
    words: Sequence[str],
    sentences: Sequence[str],
) -> "Figure":
    """Draw the vectors of the same words in two sentences, and their difference.

    Args:
        word_vectors: Vectors of the words in the first and in the second sentence, both in the
            order of `words`, by the model's positional encoding, [T, d_model] each.
        words: Words of the sentences, [T].
        sentences: The two sentences.

    Returns:
        The picture.
    """
    figure, all_axes = new_figure(
        11.0, 1.0 + 1.5 * len(word_vectors), rows=len(word_vectors), columns=3
    )
    largest_value = max(
        vectors.abs().max().item() for pair in word_vectors.values() for vectors in pair
    )
    images = {}
    largest_difference = max(
        (first - second).abs().max().item() for first, second in word_vectors.values()
    )
    for row, (name, (first, second)) in enumerate(word_vectors.items()):
        for axes, panel_values, title in zip(
            all_axes[row],
            (first, second, first - second),
            (f'in "{sentences[0]}"', f'in "{sentences[1]}"', "difference"),
            strict=True,
        ):
            color_limit = largest_difference if title == "difference" else largest_value
            images[title] = axes.imshow(
                panel_values.cpu().numpy(),
                cmap=SIGNED_COLORMAP,
                vmin=-color_limit,
                vmax=color_limit,
                aspect="auto",
            )
            axes.set_yticks(range(len(words)), words if axes is all_axes[row, 0] else [])
            if row == 0:
                axes.set_title(title, fontsize=10)
            if row == len(word_vectors) - 1:
                axes.set_xlabel("feature")
            else:
                axes.set_xticklabels([])
        all_axes[row, 0].set_ylabel(f"positions:\n{name}")
    figure.colorbar(images["difference"], ax=all_axes, label="difference")
    figure.colorbar(next(iter(images.values())), ax=all_axes, label="value")
    write_message(
        figure,
        "An untrained encoder without positions gives each word the same vector in both sentences",
    )
    return figure


def draw_accuracies(
    accuracies_by_encoding: Mapping[str, Sequence[float]], chance: float
) -> "Figure":
    """Draw the accuracy of each model: a bar for the mean, a dot for each seed.

    Args:
        accuracies_by_encoding: Accuracies of the seeds, by positional encoding.
        chance: Accuracy of a random order.

    Returns:
        The picture.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, axes = new_figure(6.4, 3.6)
    for bar, accuracies in enumerate(accuracies_by_encoding.values()):
        axes.bar(bar, fmean(accuracies), width=0.6, color=f"C{bar}", alpha=0.5)
        axes.plot([bar] * len(accuracies), accuracies, "o", color=f"C{bar}")
    chance_line = axes.axhline(chance, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(accuracies_by_encoding)), accuracies_by_encoding)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("positional encoding")
    axes.set_ylabel("share of correct sentences")
    shapes = Patch(color="grey", alpha=0.5), Line2D([], [], color="grey", marker="o", linestyle="")
    names = ("mean of the seeds", "one seed", f"random order: {chance:g}")
    figure.legend((*shapes, chance_line), names, loc="outside lower center", ncols=3, fontsize=9)
    write_message(figure, 'A model needs positions to turn "A chases B" into "B flees A"')
    return figure


def draw_losses(losses: Mapping[str, Tensor], trained_length: int, chance: float) -> "Figure":
    """Draw the loss at each position, within the trained lengths and beyond them.

    Args:
        losses: Losses by positional encoding, [seeds, T] each.
        trained_length: Longest trained length.
        chance: Loss of a random guess.

    Returns:
        The picture.
    """
    figure, axes = new_figure(7.5, 4.4)
    for name, seed_losses in losses.items():
        positions = range(1, seed_losses.shape[1] + 1)
        (line,) = axes.plot(positions, seed_losses.mean(dim=0), ".-", label=f"{name}, mean")
        axes.fill_between(
            positions,
            seed_losses.min(dim=0).values,
            seed_losses.max(dim=0).values,
            color=line.get_color(),
            alpha=0.2,
            label=f"{name}, range of {len(seed_losses)} seeds",
        )
    length = seed_losses.shape[1]
    axes.axvspan(0.5, trained_length + 0.5, color="black", alpha=0.06, label="trained positions")
    axes.axhline(chance, color="black", linewidth=0.8, linestyle=":", label="random guess")
    axes.set_xlim(0.5, length + 0.5)
    axes.set_xlabel(f"position in a sequence of {length} symbols, counted from 1")
    axes.set_ylabel("loss, nats per symbol")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    write_message(
        figure,
        f"Copying sequences of {length} symbols, trained on sequences of up to {trained_length}: "
        f"with positions, the loss rises near position {trained_length}",
    )
    return figure


def _plot_heatmap(axes: Any, encoding: Tensor, largest_value: float | None = None) -> Any:
    largest_value = encoding.abs().max().item() if largest_value is None else largest_value
    image = axes.imshow(
        encoding.numpy(),
        cmap=SIGNED_COLORMAP,
        vmin=-largest_value,
        vmax=largest_value,
        aspect="auto",
        interpolation="nearest",
    )
    # numbers of features and positions are integers, so ticks between them make no sense
    axes.locator_params(integer=True)
    axes.set_xlabel("feature")
    axes.set_ylabel("position")
    return image


def _plot_features(
    axes: Any, encoding: Tensor, shorter_encoding: Tensor, repeat: Repeat | None
) -> None:
    """Plot each feature as a line, also for a shorter sentence, with dots at a repeat."""
    for feature, values in enumerate(encoding.T):
        axes.plot(values, ".-", linewidth=0.8, markersize=3, label=f"feature {feature}")
    axes.plot(
        shorter_encoding,
        "--",
        color="black",
        linewidth=1,
        label=f"sentence of {len(shorter_encoding)} words",
    )
    if repeat is not None:
        repeated_positions = [repeat.earlier, repeat.position]
        axes.plot(
            repeated_positions,
            encoding[repeated_positions],
            "o",
            color="C3",
            label="two positions that look the same",
        )
    axes.set_xlabel("position")
    axes.set_ylabel("value")
    axes.grid(alpha=0.3)


def _plot_similarity(axes: Any, encoding: Tensor) -> Any:
    image = axes.imshow(
        cosine_similarity_matrix(encoding).numpy(), cmap=SIGNED_COLORMAP, vmin=-1, vmax=1
    )
    axes.set_xlabel("position")
    axes.set_ylabel("position")
    return image
