"""Files that the page reads: graphs, tokenizer and description of a model."""

import copy
import json
import re
from pathlib import Path

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention_maps import token_texts
from ..export.check import refuse_changed_model
from ..export.transformersjs import save_tokenizer_for_javascript
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..records import read_text
from .graphs import save_graphs

DESCRIPTION_FILE = "model.json"
RECIPE_FILE = "recipe.yaml"
# largest number of tokens in a sentence: more do not fit into the pictures of the page
MOST_TOKENS = 60
# largest number of characters in a sentence
MOST_CHARACTERS = 1000
# `max_extra_tokens` of the paper, for a model that does not set it
USUAL_EXTRA_TOKENS = 50
# search settings that the page does not implement, and the values with which each has no effect
UNSUPPORTED_SETTINGS = {
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "length_penalty": (None, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "repetition_penalty": (None, 1.0),
}


def save_for_page(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    run: str | Path | None = None,
):
    """Save a model for the page: graphs, tokenizer and `model.json`.

    Args:
        model: Model to explain.
        tokenizer: Tokenizer of the model.
        folder: Existing empty folder.
        run: Run folder, model folder or Hub name; only the recipe of a run names the corpus.

    Raises:
        ValueError: If the page cannot explain the model, or the graphs compute other logits.
    """
    model = copy.deepcopy(_require_supported(model)).eval().float().cpu()
    config, search = model.config, model.generation_config
    max_extra_tokens = search.max_extra_tokens
    if max_extra_tokens is None:
        max_extra_tokens = USUAL_EXTRA_TOKENS
    most_tokens = MOST_TOKENS
    if config.position_encoding == "learned":
        most_tokens = min(most_tokens, config.max_position_embeddings)
        max_extra_tokens = min(max_extra_tokens, config.max_position_embeddings - most_tokens)
    output_names = save_graphs(model, folder, most_tokens + max_extra_tokens)
    save_tokenizer_for_javascript(tokenizer, folder)
    end_ids = config.eos_token_id
    bad_word_ids = [ids[0] for ids in search.bad_words_ids or [] if len(ids) == 1]
    description = {
        "corpus": corpus_of(run),
        "parameters": model.num_parameters(),
        "d_model": config.d_model,
        "d_ff": config.encoder_ffn_dim,
        "d_k": model.get_encoder().layers[0].self_attention.d_k,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_heads": config.encoder_attention_heads,
        "decoder_heads": config.decoder_attention_heads,
        "vocab_size": config.vocab_size,
        "position_encoding": config.position_encoding,
        "position_base": config.position_base,
        "start": config.decoder_start_token_id,
        "ends": end_ids if isinstance(end_ids, list) else [end_ids],
        "suppressed": sorted({*(search.suppress_tokens or []), *bad_word_ids}),
        "num_beams": search.num_beams or 1,
        "alpha": 0.6 if search.length_penalty_alpha is None else search.length_penalty_alpha,
        "max_extra_tokens": max_extra_tokens,
        "calibration": getattr(search, "calibration", None),
        "most_tokens": most_tokens,
        "most_characters": MOST_CHARACTERS,
        "tokens": token_texts(tokenizer, range(len(tokenizer))),
        "outputs": output_names,
        "bytes": {
            path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()
        },
    }
    text = json.dumps(description, ensure_ascii=False, indent=1) + "\n"
    (folder / DESCRIPTION_FILE).write_text(text, encoding="utf-8")


def _require_supported(model: PreTrainedModel) -> VanillaTransformerForConditionalGeneration:
    """Return the model, or refuse a model whose computation the page cannot show."""
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise ValueError(f"model must be a vanilla_transformer, got a {type(model).__name__}.")
    refuse_changed_model(model, "the page")
    config, search = model.config, model.generation_config
    if config.norm_first:
        raise ValueError("norm_first must be False, as in figure 1, got True.")
    for name, values_without_effect in UNSUPPORTED_SETTINGS.items():
        value = getattr(search, name, None)
        if value not in values_without_effect:
            raise ValueError(f"{name} must not be set, because the page lacks it, got {value}.")
    if any(len(ids) > 1 for ids in search.bad_words_ids or []):
        raise ValueError("bad_words_ids must have single tokens for the page, got longer ones.")
    return model


def corpus_of(run: str | Path | None) -> str | None:
    """Return the name of the corpus in the recipe of a run.

    Args:
        run: Run folder.

    Returns:
        The name, or None if there is no recipe or the corpus is a path on this machine.

    Raises:
        ValueError: If the recipe cannot be read.
    """
    path = Path(run or "", RECIPE_FILE)
    if run is None or not path.is_file():
        return None
    try:
        recipe = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} must be a recipe in YAML, got a damaged file.") from error
    dataset = recipe.get("dataset") if isinstance(recipe, dict) else None
    if not isinstance(dataset, str) or Path(dataset).exists():
        return None
    return dataset if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", dataset) else None
