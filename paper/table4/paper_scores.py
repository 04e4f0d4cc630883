"""Table 4 as in the paper."""

from ...drawing import new_figure
from ..study import Section
from .pictures import MATCHED, NOT_SCORED

# parser, training, F1 on section 23 of the Wall Street Journal
TABLE_4 = (
    ("Vinyals et al. 2014", "WSJ only", 88.3),
    ("Petrov et al. 2006", "WSJ only", 90.4),
    ("Zhu et al. 2013", "WSJ only", 90.4),
    ("Dyer et al. 2016", "WSJ only", 91.7),
    ("Transformer (4 layers)", "WSJ only", 91.3),
    ("Zhu et al. 2013", "semi-supervised", 91.3),
    ("Huang & Harper 2009", "semi-supervised", 91.3),
    ("McClosky et al. 2006", "semi-supervised", 92.1),
    ("Vinyals et al. 2014", "semi-supervised", 92.1),
    ("Transformer (4 layers)", "semi-supervised", 92.7),
    ("Luong et al. 2015", "multi-task", 93.0),
    ("Dyer et al. 2016", "generative", 93.3),
)
TRANSFORMER = "Transformer (4 layers)"


def published_section() -> Section:
    """Show Table 4 of the paper.

    Returns:
        Section with the rows and a bar chart.
    """
    figure, axes = new_figure(7.0, 4.4)
    rows = TABLE_4[::-1]
    bar_colors = [MATCHED if parser == TRANSFORMER else NOT_SCORED for parser, _, _ in rows]
    bars = axes.barh(range(len(rows)), [f1 for *_, f1 in rows], color=bar_colors)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_yticks(range(len(rows)), [f"{parser}, {training}" for parser, training, _ in rows])
    axes.set_xlim(86, 94.5)
    axes.set_xlabel("labeled bracket F1 on section 23 (the axis starts at 86)")
    transformer_f1 = {training: f1 for parser, training, f1 in TABLE_4 if parser == TRANSFORMER}
    other_f1 = [
        f1
        for parser, training, f1 in TABLE_4
        if training in transformer_f1 and parser != TRANSFORMER
    ]
    num_beaten = sum(
        transformer_f1[training] > f1
        for parser, training, f1 in TABLE_4
        if training in transformer_f1 and parser != TRANSFORMER
    )
    return Section(
        name="published",
        title="Table 4 of the paper",
        finding="The paper parses by translation into brackets, with no change of the model for "
        f"trees. Its {TRANSFORMER} still beats {num_beaten} of the {len(other_f1)} parsers with "
        f"the same training data: {transformer_f1['WSJ only']} F1 with 40,000 trees, and "
        f"{transformer_f1['semi-supervised']} F1 with additional text that another parser has "
        "parsed. All numbers are the paper's.",
        columns=("parser", "training", "F1 on WSJ 23"),
        rows=TABLE_4,
        figure=figure,
        message=f"The Transformer (blue) beats {num_beaten} of the {len(other_f1)} parsers with "
        "the same training data",
    )
