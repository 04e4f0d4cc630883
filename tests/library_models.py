"""Small models of the library for translation, with random weights and their real tokenizers."""

import json

import sentencepiece
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartTokenizer,
    FSMTConfig,
    FSMTForConditionalGeneration,
    FSMTTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    NllbTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

SENTENCES = [
    "the small cat sleeps in the house",
    "dogs bark at the small cat",
    "a house is small",
    "das Haus ist klein",
    "die kleine Katze schläft",
    "Hunde bellen",
]
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    # weights so large that random models write different words
    "init_std": 1.0,
}
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
PREFIX = "translate English to German: "


def make_pieces(folder):
    """Train a sentencepiece model; return its file, and its pieces with their scores."""
    folder.joinpath("text").write_text("\n".join([*SENTENCES, PREFIX] * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "spm"),
        vocab_size=60,
        hard_vocab_limit=False,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    scores = [(model.id_to_piece(i), model.get_score(i)) for i in range(4, model.get_piece_size())]
    return folder / "spm.model", scores


def write_json(path, value):
    path.write_text(json.dumps(value))
    return str(path)


def numbered(tokens):
    return {token: index for index, token in enumerate(tokens)}


def make_marian(pieces, folder):
    file, scores = pieces
    vocab = numbered(["</s>", "<unk>", *(piece for piece, _ in scores), "<pad>"])
    tokenizer = MarianTokenizer(
        source_spm=str(file),
        target_spm=str(file),
        vocab=write_json(folder / "vocab.json", vocab),
        source_lang="en",
        target_lang="de",
    )
    pad = vocab["<pad>"]
    config = MarianConfig(
        vocab_size=len(vocab),
        pad_token_id=pad,
        eos_token_id=0,
        decoder_start_token_id=pad,
        forced_eos_token_id=0,
        scale_embedding=True,
        **SIZES,
    )
    return MarianMTModel(config), tokenizer


def fsmt_of(source, target, folder, **fields):
    """FSMT with the given tokens of the source and of the target."""
    merges = folder / "merges.txt"
    merges.write_text("#version: 0.2\n")
    tokenizer = FSMTTokenizer(
        langs=["en", "de"],
        src_vocab_file=write_json(folder / "vocab-src.json", numbered(source)),
        tgt_vocab_file=write_json(folder / "vocab-tgt.json", numbered(target)),
        merges_file=str(merges),
    )
    config = FSMTConfig(
        langs=["en", "de"],
        src_vocab_size=len(source),
        tgt_vocab_size=len(target),
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        **SIZES,
        **fields,
    )
    return FSMTForConditionalGeneration(config), tokenizer


def fsmt_pieces():
    letters = sorted(set("".join(SENTENCES)) - {" "})
    return [*letters, *(f"{letter}</w>" for letter in letters)]


def make_fsmt(pieces, folder):
    tokens = [*SPECIAL, *fsmt_pieces()]
    return fsmt_of(tokens, tokens, folder)


def make_marian_of_two(pieces, folder):
    """Marian with `separate_vocabs`: the same pieces have other ids in the target."""
    file, scores = pieces
    names = [piece for piece, _ in scores]
    source = numbered(["</s>", "<unk>", *names, "<pad>"])
    target = numbered(["</s>", "<unk>", *reversed(names), "another", "more"])
    tokenizer = MarianTokenizer(
        source_spm=str(file),
        target_spm=str(file),
        vocab=write_json(folder / "vocab.json", source),
        target_vocab_file=write_json(folder / "target_vocab.json", target),
        source_lang="en",
        target_lang="de",
        separate_vocabs=True,
    )
    pad = source["<pad>"]
    config = MarianConfig(
        vocab_size=len(source),
        decoder_vocab_size=len(target),
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        pad_token_id=pad,
        eos_token_id=0,
        decoder_start_token_id=pad,
        forced_eos_token_id=0,
        scale_embedding=True,
        **SIZES,
    )
    return MarianMTModel(config), tokenizer


def make_fsmt_of_two(pieces, folder, extra=("another</w>", "more</w>")):
    """FSMT whose target vocabulary has another order, and more tokens."""
    pieces = fsmt_pieces()
    source, target = [*SPECIAL, *pieces], [*SPECIAL, *reversed(pieces), *extra]
    return fsmt_of(source, target, folder, tie_word_embeddings=False)


def make_bart(pieces, folder):
    letters = sorted(set("".join(SENTENCES)) | {"Ġ", "Ã", "¤"})
    tokens = [*SPECIAL, *letters, "<mask>"]
    tokenizer = BartTokenizer(vocab=numbered(tokens), merges=[])
    config = BartConfig(vocab_size=len(tokens), pad_token_id=1, eos_token_id=2, **SIZES)
    return BartForConditionalGeneration(config), tokenizer


def make_t5(pieces, folder):
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces[1]]
    tokenizer = T5Tokenizer(vocab=scores, extra_ids=0)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        initializer_factor=20.0,
        task_specific_params={"translation_en_to_de": {"prefix": PREFIX, "num_beams": 3}},
    )
    return T5ForConditionalGeneration(config), tokenizer


def make_m2m(pieces, folder):
    file, scores = pieces
    vocab = numbered([*SPECIAL, *(piece for piece, _ in scores)])
    tokenizer = M2M100Tokenizer(write_json(folder / "vocab.json", vocab), str(file))
    config = M2M100Config(
        vocab_size=max(tokenizer.lang_code_to_id.values()) + 1,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        **SIZES,
    )
    return M2M100ForConditionalGeneration(config), tokenizer


def make_nllb(pieces, folder):
    letters = sorted(set("".join(SENTENCES)) - {" "} | {"▁"})
    tokenizer = NllbTokenizer(vocab=numbered([*SPECIAL, *letters]), merges=[])
    config = M2M100Config(
        vocab_size=len(tokenizer),
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        **SIZES,
    )
    model = M2M100ForConditionalGeneration(config)
    # a random model would write languages, of which there are more than letters
    model.get_input_embeddings().weight.data[len(letters) + len(SPECIAL) :] *= 0.2
    return model, tokenizer


def make_mbart(pieces, folder):
    tokenizer = MBart50Tokenizer(vocab=[*((token, 0.0) for token in SPECIAL), *pieces[1]])
    config = MBartConfig(
        vocab_size=len(tokenizer),
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        **SIZES,
    )
    return MBartForConditionalGeneration(config), tokenizer


LANGUAGES = {"src_lang": "en", "tgt_lang": "de"}
# maker of a model, and source and target language if there are several
KINDS = {
    "marian": (make_marian, {}),
    "fsmt": (make_fsmt, {}),
    "marian of two": (make_marian_of_two, {}),
    "fsmt of two": (make_fsmt_of_two, {}),
    "bart": (make_bart, {}),
    "t5": (make_t5, {}),
    "m2m100": (make_m2m, LANGUAGES),
    "nllb": (make_nllb, {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}),
    "mbart50": (make_mbart, {"src_lang": "en_XX", "tgt_lang": "de_DE"}),
}


def save(kind, pieces, folder):
    """Write a model of the library and its tokenizer to a folder."""
    make, _ = KINDS[kind]
    torch.manual_seed(3)
    model, tokenizer = make(pieces, folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def search_by_hand(model, tokenizer, texts, languages, **search):
    """Return what `generate` gives for one text at a time, as the models' documentation says."""
    if languages:
        tokenizer.src_lang = languages["src_lang"]
        # M2M100's language tokens are outside of its vocabulary
        lookup = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)
        search["forced_bos_token_id"] = lookup(languages["tgt_lang"])
    found = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        found.append(model.generate(**inputs, **search))
    return found


def by_hand(model, tokenizer, texts, languages, **search):
    """Translate one text at a time."""
    ids = search_by_hand(model, tokenizer, texts, languages, **search)
    return [tokenizer.decode(row[0], skip_special_tokens=True) for row in ids]
