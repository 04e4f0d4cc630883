"""State of a run, as a checkpoint saves it."""

import json

import pytest

from vanilla_transformer.train.run_folder.run_state import RunState

# entries as in checkpoints of earlier versions: their names must stay
SAVED = {
    "step": 6,
    "num_skipped": 1,
    "skipped_in_a_row": 0,
    "is_save_postponed": False,
    "window": {"loss": 2.5, "tokens": 7, "cells": 12, "filled_cells": 9},
    "data": {"pairs": 90},
    "stream_position": {
        "block": 1,
        "first_step": 4,
        "counts": {"kept": 30},
        "places": [{"pass": 0, "shard": 1, "pairs": 30, "state": None}],
        "block_counts": {"kept": 29},
        "text_sha256": "a5",
    },
    "num_processes": 2,
    "tokens_per_micro_batch": 80,
    "best_checkpoint": {"metric": "loss", "step": 4, "score": 5.5, "later": 1},
    "cooldown": {"steps": 3, "last_step": 9, "max_minutes": 2.0},
    "seconds": 1.5,
    "settings": {"seed": 2},
}
# entries that checkpoints of earlier versions lack
LATER = ("best_checkpoint", "cooldown", "settings")


def test_a_saved_state_comes_back(tmp_path):
    state = RunState.from_json({**SAVED, "is_stop": False}, tmp_path)
    assert json.loads(json.dumps(state.to_json())) == SAVED


def test_a_state_from_before_best_checkpoints_cooldowns_and_settings_is_read(tmp_path):
    saved = {name: entry for name, entry in SAVED.items() if name not in LATER}
    assert RunState.from_json(saved, tmp_path).to_json() == SAVED | dict.fromkeys(LATER)


@pytest.mark.parametrize("name", sorted(SAVED.keys() - {*LATER}))
def test_a_missing_or_wrong_entry_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=f"must have {name}"):
        RunState.from_json({k: v for k, v in SAVED.items() if k != name}, tmp_path)
    with pytest.raises(ValueError, match=f": {name} must be .*, got 'x'"):
        RunState.from_json({**SAVED, name: "x"}, tmp_path)
