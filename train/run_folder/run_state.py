"""State of a run that a checkpoint saves beside the tensors, in `state.json`."""

# `_saved` makes a field, which ruff does not know
# ruff: noqa: RUF009

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...records import (
    ANYTHING,
    NOTHING,
    NUMBER,
    TEXT,
    TRUTH,
    Schema,
    check,
    list_of,
    mapping,
    or_null,
    whole_number,
)

# saved names of two sums of a window: all positions of its batches, and those without padding
POSITIONS, NON_PADDING_TOKENS = "cells", "filled_cells"
# saved name of the position in each stream, in the position of a streamed run
STREAM_POSITIONS = "places"
COUNTS_SCHEMA = mapping(other_items=whole_number(0))
WINDOW_SCHEMA = mapping(
    {
        "loss": NUMBER,
        "tokens": whole_number(0),
        POSITIONS: whole_number(0),
        NON_PADDING_TOKENS: whole_number(0),
    },
    other_items=NOTHING,
)
STREAM_POSITION_SCHEMA = mapping(
    {"pass": whole_number(0), "shard": whole_number(0), "pairs": whole_number(0), "state": ANYTHING}
)
POSITION_SCHEMA = mapping(
    {
        "block": whole_number(0),
        "first_step": whole_number(0),
        "counts": COUNTS_SCHEMA,
        STREAM_POSITIONS: list_of(STREAM_POSITION_SCHEMA, least=1),
        "block_counts": COUNTS_SCHEMA,
        "text_sha256": TEXT,
    }
)
# best checkpoint so far: metric, step, score by this metric, and number of checkpoints after it
BEST_SCHEMA = mapping(
    {"metric": TEXT, "step": whole_number(1), "score": NUMBER, "later": whole_number(0)},
    other_items=NOTHING,
)
# cooldown that began earlier than the settings say, so that it ends within `max_minutes`
COOLDOWN_SCHEMA = mapping(
    {"steps": whole_number(1), "last_step": whole_number(1), "max_minutes": NUMBER},
    other_items=NOTHING,
)


def _saved(default: Any, schema: Schema, is_optional: bool = False) -> Any:
    metadata = {"schema": schema, "is_optional": is_optional}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class RunState:
    """State of a run. Each field is an entry of `state.json`; the defaults are those of a new run.

    Args:
        step: Number of steps done.
        seconds: Training time in seconds.
        num_skipped: Number of skipped steps.
        skipped_in_a_row: Number of skipped steps since the last step that was not skipped.
        is_save_postponed: Whether a checkpoint is due and waits for a step that is not skipped.
        window: Sums since the last line of `metrics.jsonl`; None before the first step.
        data: Facts about data and tokenizer that must not change; None in a new run.
        stream_position: Position in the streams at which the block of the last step began; None
            for corpora that are not streamed.
        num_processes: Number of processes that made the last step; None in a new run.
        tokens_per_micro_batch: Size of the micro-batches of the last step; None in a new run.
        best_checkpoint: `metric`, `step` and `score` of the best checkpoint so far, and the number
            of `later` checkpoints; None before the first checkpoint and without `best_metric`.
        cooldown: Number of `steps` and `last_step` of a cooldown that began early, and the
            `max_minutes` for which it was planned; None without such a cooldown.
        settings: Settings of the last step by name, which may differ from an edited recipe; None in
            a new run and in checkpoints of earlier versions.
    """

    step: int = _saved(0, whole_number(0))
    seconds: float = _saved(0.0, NUMBER)
    num_skipped: int = _saved(0, whole_number(0))
    skipped_in_a_row: int = _saved(0, whole_number(0))
    is_save_postponed: bool = _saved(False, TRUTH)
    window: dict[str, float] | None = _saved(None, or_null(WINDOW_SCHEMA))
    data: dict[str, Any] | None = _saved(None, mapping())
    stream_position: dict[str, Any] | None = _saved(None, or_null(POSITION_SCHEMA))
    num_processes: int | None = _saved(None, whole_number(1))
    tokens_per_micro_batch: int | None = _saved(None, whole_number(1))
    best_checkpoint: dict[str, Any] | None = _saved(None, or_null(BEST_SCHEMA), is_optional=True)
    cooldown: dict[str, Any] | None = _saved(None, or_null(COOLDOWN_SCHEMA), is_optional=True)
    settings: dict[str, Any] | None = _saved(None, or_null(mapping()), is_optional=True)

    @classmethod
    def from_json(cls, entries: Mapping[str, Any], path: Path) -> "RunState":
        """Check and take the entries of a saved state.

        Args:
            entries: Entries of `state.json`; other entries are ignored.
            path: Path of the file, for errors.

        Returns:
            The state.

        Raises:
            ValueError: If an entry is missing or has a wrong value; names it.
        """
        fields = dataclasses.fields(cls)
        required, optional = (
            {
                field.name: field.metadata["schema"]
                for field in fields
                if field.metadata["is_optional"] == is_optional
            }
            for is_optional in (False, True)
        )
        check(entries, mapping(required, optional), path)
        return cls(**{field.name: entries[field.name] for field in fields if field.name in entries})

    def to_json(self) -> dict[str, Any]:
        """Return the entries to save, by name."""
        return dict(vars(self))
