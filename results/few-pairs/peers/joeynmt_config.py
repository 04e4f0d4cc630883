"""Write text, vocabulary and configuration of a training run of Joey NMT.

    python joeynmt_config.py PAIRS

The configuration is transformer_small.yaml of Joey NMT's repository, for data/multi30k-PAIRS, with
a SentencePiece vocabulary of 2,000 tokens for both languages. Joey NMT translates the validation
set at each validation, so it gets only 100 pairs of it, after every 2,000 updates.
"""

import json
import sys
from pathlib import Path

import sentencepiece
import yaml

pairs = int(sys.argv[1])
folder = Path(f"joey-small-{pairs}")
folder.mkdir(exist_ok=True)
for split in ("train", "validation", "test"):
    lines = Path(f"data/multi30k-{pairs}/en-de/{split}.jsonl").read_text().splitlines()
    records = [json.loads(line)["translation"] for line in lines]
    records = records[:100] if split == "validation" else records
    for language in ("en", "de"):
        text = "".join(record[language] + "\n" for record in records)
        (folder / f"{split}.{language}").write_text(text)
sentencepiece.SentencePieceTrainer.train(
    input=[str(folder / "train.en"), str(folder / "train.de")],
    model_prefix=str(folder / "spm"),
    vocab_size=2000,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
    character_coverage=1.0,
    minloglevel=2,
)
processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
tokens = [processor.id_to_piece(index) for index in range(len(processor))]
(folder / "vocab.txt").write_text("".join(token + "\n" for token in tokens))


def side(language: str) -> dict:
    """Return the settings of one side of the text."""
    return {
        "lang": language,
        "max_length": 128,
        "level": "bpe",
        "voc_file": str(folder / "vocab.txt"),
        "tokenizer_type": "sentencepiece",
        "tokenizer_cfg": {"model_file": str(folder / "spm.model"), "pretokenizer": "none"},
    }


stack = {
    "type": "transformer",
    "num_layers": 3,
    "num_heads": 4,
    "hidden_size": 64,
    "ff_size": 128,
    "dropout": 0.1,
    "embeddings": {"embedding_dim": 64, "scale": True},
}
config = {
    "name": "few",
    "joeynmt_version": "2.3.0",
    "model_dir": str(folder / "model"),
    "use_cuda": False,
    "fp16": False,
    "random_seed": 42,
    "data": {
        "train": str(folder / "train"),
        "dev": str(folder / "validation"),
        "test": str(folder / "test"),
        "dataset_type": "plain",
        "src": side("en"),
        "trg": side("de"),
        "special_symbols": {
            "unk_token": "<unk>",
            "unk_id": 0,
            "pad_token": "<pad>",
            "pad_id": 1,
            "bos_token": "<s>",
            "bos_id": 2,
            "eos_token": "</s>",
            "eos_id": 3,
        },
    },
    "testing": {
        "batch_size": 32,
        "batch_type": "sentence",
        "beam_size": 5,
        "beam_alpha": 1.0,
        "eval_metrics": ["bleu"],
        "max_output_length": 60,
        "sacrebleu_cfg": {"tokenize": "13a"},
    },
    "training": {
        "optimizer": "adam",
        "adam_betas": [0.9, 0.98],
        "learning_rate": 0.001,
        "learning_rate_min": 0.000001,
        "learning_rate_factor": 0.5,
        "learning_rate_warmup": 1000,
        "weight_decay": 0.0,
        "batch_size": 250,
        "batch_type": "token",
        "batch_multiplier": 1,
        "normalization": "tokens",
        "scheduling": "noam",
        "loss": "crossentropy",
        "label_smoothing": 0.0,
        "epochs": 10000,
        "updates": 1000000,
        "validation_freq": 2000,
        "logging_freq": 100,
        "early_stopping_metric": "loss",
        "shuffle": True,
        "print_valid_sents": [0],
        "keep_best_ckpts": 3,
    },
    "model": {
        "initializer": "xavier_uniform",
        "init_gain": 1.0,
        "bias_initializer": "zeros",
        "embed_initializer": "xavier_uniform",
        "embed_init_gain": 1.0,
        "tied_embeddings": True,
        "tied_softmax": True,
        "encoder": stack,
        "decoder": stack,
    },
}
(folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
