"""Make `tests/peers`: small checkpoints of fairseq, OpenNMT-py and JoeyNMT, with their results.

Each is trained for a moment by its own command, and then asked for logits and translations by its
own code. Made with fairseq 0.12.2, OpenNMT-py 3.5.1 and subword-nmt 0.3.8, which are older than
the other packages here and so have an environment of their own:

    TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 python tests/make_peer_checkpoints.py fairseq opennmt

JoeyNMT 2.3.0 runs with the versions of constraints.txt, except that of sentencepiece:

    pip install --no-deps joeynmt subword-nmt importlib-metadata zipp lazy-importer
    pip install sentencepiece==0.2.0
    python tests/make_peer_checkpoints.py joeynmt
"""

import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

PEERS = Path(__file__).parent / "peers"
WORDS = "ant bee cat dog elk fox gnu hen ibis jay kite lynx mole newt owl pig".split()  # noqa: SIM905
TEXTS = ["The owl pig jay ant.", "Bee cat, dog mole newt!", "A fox-gnu kite?", "Newts"]
FAIRSEQ = {
    "fairseq-post": ["--arch", "transformer", "--share-all-embeddings"],
    "fairseq-pre": [
        *("--arch", "transformer_iwslt_de_en", "--share-decoder-input-output-embed"),
        *("--encoder-normalize-before", "--decoder-normalize-before", "--activation-fn", "gelu"),
        *("--encoder-learned-pos", "--decoder-learned-pos"),
        *("--max-source-positions", "60", "--max-target-positions", "50"),
    ],
}
OPENNMT = {
    "opennmt": ["-share_embeddings", "-share_decoder_embeddings"],
    "opennmt-concat": [
        *("-position_encoding_type", "SinusoidalConcat", "-add_qkvbias", "-add_ffnbias"),
        *("-share_decoder_embeddings", "-pos_ffn_activation_fn", "gelu"),
    ],
}
# for each model: settings of a text, and settings of the model
JOEYNMT = {
    "joeynmt-pieces": (
        {
            "level": "bpe",
            "tokenizer_type": "sentencepiece",
            "tokenizer_cfg": {"model_file": "pieces.model"},
        },
        {"layer_norm": "pre", "tied_embeddings": True, "tied_softmax": True, "scale": True},
    ),
    "joeynmt-words": (
        {"level": "word", "lowercase": True, "normalize": True},
        {"layer_norm": "post", "tied_embeddings": False, "tied_softmax": True, "scale": False},
    ),
    "joeynmt-characters": (
        {"level": "char"},
        {"layer_norm": "pre", "tied_softmax": False, "scale": True, "activation": "swish"},
    ),
    "joeynmt-codes": (
        {
            "level": "bpe",
            "tokenizer_type": "subword-nmt",
            "tokenizer_cfg": {"codes": "bpecodes"},
        },
        {"layer_norm": "post", "tied_embeddings": True, "scale": True, "activation": "gelu"},
    ),
}


def write_corpus(folder: Path) -> None:
    """Return sentences split by Moses; the German is the English in reverse order."""
    rng = random.Random(3)
    for split, count in (("train", 300), ("valid", 20)):
        pairs = []
        for _ in range(count):
            words = rng.choices(WORDS, k=rng.randint(1, 6))
            words[0] = rng.choice(["The", "A", words[0].capitalize()])
            pairs.append((words, words[::-1], rng.choice(".!?;")))
        for lang, side in (("en", 0), ("de", 1)):
            lines = [" ".join(pair[side]) + f" {pair[2]}\n" for pair in pairs]
            (folder / f"{split}.{lang}").write_text("".join(lines), encoding="utf-8")


def cut(folder: Path) -> None:
    """Learn BPE of both languages, and apply it."""
    from subword_nmt.apply_bpe import BPE
    from subword_nmt.learn_bpe import learn_bpe

    lines = []
    for lang in ("en", "de"):
        lines += (folder / f"train.{lang}").read_text("utf-8").splitlines(keepends=True)
    with (folder / "bpecodes").open("w", encoding="utf-8") as codes:
        learn_bpe(lines, codes, 40)
    with (folder / "bpecodes").open(encoding="utf-8") as codes:
        bpe = BPE(codes)
    for split in ("train", "valid"):
        for lang in ("en", "de"):
            text = (folder / f"{split}.{lang}").read_text("utf-8")
            pieces = [bpe.process_line(line) for line in text.splitlines(keepends=True)]
            (folder / f"{split}.bpe.{lang}").write_text("".join(pieces), encoding="utf-8")


def write_json(path: Path, content: dict) -> None:
    """Format JSON with a line for each entry and for the logits of each position."""
    lines = []
    for name, value in content.items():
        text = json.dumps(value, ensure_ascii=False)
        if name == "logits":
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value[0])
            text = f"[[\n{rows}\n ]]"
        lines.append(f" {json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def rounded(logits: torch.Tensor) -> list:
    return [[[round(value, 6) for value in row] for row in rows] for rows in logits.tolist()]


def make_fairseq(name: str, flags: list[str], corpus: Path, work: Path) -> None:
    """Train with fairseq's commands, translate with its hub interface."""
    from fairseq.models.transformer import TransformerModel

    binarized, saved = work / f"{name}-data", work / f"{name}-model"
    words = ["--source-lang", "en", "--target-lang", "de", "--joined-dictionary"]
    words += ["--trainpref", str(corpus / "train.bpe"), "--validpref", str(corpus / "valid.bpe")]
    run = [sys.executable, "-m", "fairseq_cli.preprocess", *words, "--destdir", str(binarized)]
    subprocess.run(run, check=True)
    sizes = []
    for stack in ("encoder", "decoder"):
        sizes += [f"--{stack}-embed-dim", "16", f"--{stack}-ffn-embed-dim", "24"]
        sizes += [f"--{stack}-layers", "1", f"--{stack}-attention-heads", "2"]
    run = [sys.executable, "-m", "fairseq_cli.train", str(binarized), *flags, *sizes]
    run += ["--optimizer", "adam", "--lr", "0.005", "--criterion", "cross_entropy"]
    run += ["--max-tokens", "400", "--max-update", "200", "--seed", "1", "--cpu"]
    run += ["--source-lang", "en", "--target-lang", "de"]
    run += ["--save-dir", str(saved), "--no-epoch-checkpoints", "--no-save-optimizer-state"]
    subprocess.run(run, check=True)

    folder = PEERS / name
    folder.mkdir(parents=True)
    shutil.copy(saved / "checkpoint_last.pt", folder / "model.pt")
    for lang in ("en", "de"):
        shutil.copy(binarized / f"dict.{lang}.txt", folder)
    shutil.copy(corpus / "bpecodes", folder / "bpecodes")
    hub = TransformerModel.from_pretrained(
        str(folder), "model.pt", str(folder), tokenizer="moses", bpe="subword_nmt",
        bpe_codes=str(folder / "bpecodes"),
    )  # fmt: skip
    hub.eval()
    source = hub.encode(TEXTS[0])[None]
    target = hub.encode(TEXTS[1])[None, :6]
    target = torch.cat((torch.tensor([[2]]), target), dim=1)
    with torch.no_grad():
        lengths = torch.tensor([source.shape[1]])
        logits, _ = hub.models[0](source, lengths, target)
    beams = [hub.generate(hub.encode(text), beam=5)[0]["tokens"].tolist() for text in TEXTS]
    content = {
        "source": source.tolist(),
        "target": target.tolist(),
        "logits": rounded(logits),
        "texts": TEXTS,
        "text_ids": [hub.encode(text).tolist() for text in TEXTS],
        "beam5": beams,
        "beam5_texts": [hub.translate(text, beam=5) for text in TEXTS],
        "greedy": [hub.generate(hub.encode(t), beam=1)[0]["tokens"].tolist() for t in TEXTS],
    }
    write_json(folder / "expected.json", content)


def make_opennmt(name: str, flags: list[str], corpus: Path, work: Path) -> None:
    """Train with OpenNMT-py's commands, translate with its translator."""
    from onmt.bin.train import train
    from onmt.model_builder import load_test_model
    from onmt.opts import train_opts, translate_opts
    from onmt.utils.parse import ArgumentParser

    data = {
        "corpus": {
            "path_src": str(corpus / "train.bpe.en"),
            "path_tgt": str(corpus / "train.bpe.de"),
        },
        "valid": {
            "path_src": str(corpus / "valid.bpe.en"),
            "path_tgt": str(corpus / "valid.bpe.de"),
        },
    }
    vocabulary = work / "vocabulary"
    tokens = sorted(
        {
            word
            for lang in ("en", "de")
            for word in (corpus / f"train.bpe.{lang}").read_text("utf-8").split()
        }
    )
    vocabulary.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    config = work / f"{name}.json"
    config.write_text(json.dumps({"data": data}), encoding="utf-8")
    parser = ArgumentParser()
    train_opts(parser)
    words = ["-config", str(config), "-src_vocab", str(vocabulary), "-tgt_vocab", str(vocabulary)]
    words += ["-share_vocab", "-save_model", str(work / name), "-train_steps", "200"]
    words += ["-encoder_type", "transformer", "-decoder_type", "transformer", "-position_encoding"]
    words += ["-layers", "1", "-hidden_size", "16", "-word_vec_size", "16", "-transformer_ff", "24"]
    words += ["-heads", "2", "-optim", "adam", "-learning_rate", "0.005", "-batch_size", "400"]
    words += ["-batch_type", "tokens", "-seed", "1", "-param_init_glorot", "-param_init", "0"]
    words += ["-save_checkpoint_steps", "200", "-valid_steps", "1000", "-num_workers", "0", *flags]
    options, _ = parser.parse_known_args(words)
    ArgumentParser.validate_train_opts(options)
    ArgumentParser.update_model_opts(options)
    ArgumentParser.validate_model_opts(options)
    train(options)
    folder = PEERS / name
    folder.mkdir(parents=True)
    checkpoint = torch.load(work / f"{name}_step_200.pt", weights_only=False)
    del checkpoint["optim"]
    torch.save(checkpoint, folder / "model.pt")
    parser = ArgumentParser()
    translate_opts(parser)
    path = str(folder / "model.pt")
    options, _ = parser.parse_known_args(["-model", path, "-src", "unused"])
    vocabs, model, _ = load_test_model(options, device_id=-1, model_path=path)
    texts = (corpus / "valid.bpe.en").read_text("utf-8").splitlines()[:4]
    source = torch.tensor([[vocabs["src"][token] for token in texts[0].split()]])
    target = torch.tensor([[vocabs["tgt"][token] for token in ["<s>", *texts[1].split()]]])
    with torch.no_grad():
        # OpenNMT-py leaves out the last token of a target
        padded = torch.nn.functional.pad(target, (0, 1))[:, :, None]
        lengths = torch.tensor([source.shape[1]])
        states, _ = model.eval()(source[:, :, None], padded, lengths)
        logits = model.generator(states)
    (work / "texts").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    # its beam search keeps finished hypotheses in the beam, so only greedy search equals ours
    words = ["-model", path, "-src", str(work / "texts"), "-output", str(work / "out")]
    words += ["-beam_size", "1", "-max_length", "20"]
    subprocess.run([sys.executable, "-m", "onmt.bin.translate", *words], check=True)
    content = {
        "source": source.tolist(),
        "target": target.tolist(),
        "logits": rounded(logits),
        "texts": texts,
        "greedy_texts": (work / "out").read_text("utf-8").splitlines(),
    }
    write_json(folder / "expected.json", content)
    # keep 9 of the 5,000 sinusoids, which are the same in every model
    for stack in ("encoder", "decoder"):
        name = f"{stack}.embeddings.make_embedding.pe.pe"
        checkpoint["model"][name] = checkpoint["model"][name][:9].clone()
    torch.save(checkpoint, folder / "model.pt")


def joeynmt_vocabulary(text_settings: dict, corpus: Path) -> list[str]:
    """Return the tokens of both languages, without special tokens."""
    if text_settings.get("tokenizer_type") == "sentencepiece":
        from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

        SentencePieceTrainer.train(
            input=[str(corpus / "train.en"), str(corpus / "train.de")],
            model_prefix=str(corpus / "pieces"),
            vocab_size=48,
            character_coverage=1.0,
            normalization_rule_name="identity",
            minloglevel=2,
        )
        pieces = SentencePieceProcessor(str(corpus / "pieces.model"))
        return [pieces.id_to_piece(index) for index in range(len(pieces))]
    from joeynmt.tokenizers import _build_tokenizer

    # the vocabulary filter of subword-nmt needs the vocabulary that is made here
    prefix = "train.bpe" if "codes" in text_settings.get("tokenizer_cfg", {}) else "train"
    split = _build_tokenizer({**text_settings, "lang": "en"})
    tokens = set()
    for lang in ("en", "de"):
        for line in (corpus / f"{prefix}.{lang}").read_text("utf-8").splitlines():
            tokens |= set(line.split() if prefix == "train.bpe" else split(split.pre_process(line)))
    return sorted(tokens)


def make_joeynmt(name: str, text_settings: dict, model_settings: dict, corpus: Path) -> None:
    """Train with JoeyNMT's command, translate with its search."""
    from joeynmt.config import TestConfig, load_config, parse_global_args
    from joeynmt.prediction import predict, prepare

    vocabulary = joeynmt_vocabulary(text_settings, corpus)
    Path("vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary), encoding="utf-8")
    stack = {
        "type": "transformer",
        "num_heads": 2,
        "hidden_size": 16,
        "ff_size": 24,
        "dropout": 0.0,
        "embeddings": {"embedding_dim": 16, "scale": model_settings["scale"]},
        "layer_norm": model_settings["layer_norm"],
        "activation": model_settings.get("activation", "relu"),
    }
    sides = {
        side: {"lang": lang, "max_length": 100, "voc_file": "vocab.txt", **text_settings}
        for side, lang in (("src", "en"), ("trg", "de"))
    }
    settings = {
        "name": name,
        "joeynmt_version": "2.3.0",
        "model_dir": name,
        "use_cuda": False,
        "fp16": False,
        "data": {"train": "train", "dev": "valid", "dataset_type": "plain", **sides},
        "testing": {"beam_size": 5, "beam_alpha": 1.0, "max_output_length": 60},
        "training": {
            "optimizer": "adam",
            "learning_rate": 0.01,
            "scheduling": "warmupinversesquareroot",
            "learning_rate_warmup": 50,
            "learning_rate_min": 0.0,
            "batch_size": 1000,
            "batch_type": "token",
            "updates": 600,
            "epochs": 600,
            "validation_freq": 600,
            "logging_freq": 100,
            "early_stopping_metric": "loss",
        },
        "model": {
            "initializer": "xavier_uniform",
            "embed_initializer": "xavier_uniform",
            "tied_embeddings": model_settings.get("tied_embeddings", False),
            "tied_softmax": model_settings.get("tied_softmax", False),
            "encoder": {**stack, "num_layers": 1},
            "decoder": {**stack, "num_layers": 2},
        },
    }
    Path("settings.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    run = [sys.executable, "-m", "joeynmt", "train", "settings.yaml", "--skip-test"]
    subprocess.run(run, check=True)

    folder = PEERS / name
    folder.mkdir(parents=True)
    for path in Path(name).iterdir():
        if path.name in ("config.yaml", "src_vocab.txt", "trg_vocab.txt", "pieces.model"):
            shutil.copy(path, folder)
        if path.name == "bpecodes":
            shutil.copy(path, folder)
    arguments = parse_global_args(load_config(f"{name}/config.yaml"), mode="translate")
    model, _, _, data = prepare(arguments, rank=0, mode="translate")
    model.eval()

    def translations(**search) -> list[str]:
        data.reset_cache()
        for text in texts:
            data.set_item(text)
        test_arguments = TestConfig(**{**arguments.test._asdict(), "batch_size": 1, **search})
        return predict(model, data, torch.device("cpu"), 0, args=test_arguments,
                       autocast=arguments.autocast)[2]  # fmt: skip

    def ids_of(text: str) -> list[int]:
        tokenizer = data.tokenizer["en"]
        pieces = tokenizer(tokenizer.pre_process(text))
        return [*map(model.src_vocab.lookup, pieces), model.eos_index]

    texts = (corpus / "valid.en").read_text("utf-8").splitlines()[:4] + TEXTS
    source = torch.tensor([ids_of(texts[0])])
    target = torch.tensor([[model.bos_index, *ids_of(texts[1])[:-1]]])
    with torch.no_grad():
        logits, *_ = model._encode_decode(
            src=source,
            trg_input=target,
            src_mask=torch.ones(1, 1, source.shape[1], dtype=torch.bool),
            src_length=torch.tensor([source.shape[1]]),
            trg_mask=torch.ones(1, 1, target.shape[1], dtype=torch.bool),
        )
    content = {
        "source": source.tolist(),
        "target": target.tolist(),
        "logits": rounded(logits),
        "texts": texts,
        "text_ids": list(map(ids_of, texts)),
        "greedy_texts": translations(beam_size=1),
        "beam5_texts": translations(beam_size=5),
    }
    write_json(folder / "expected.json", content)
    checkpoint = torch.load(f"{name}/best.ckpt")
    del checkpoint["optimizer_state"]
    # keep 9 of the 5,000 sinusoids, which are the same in every model
    for stack_name in ("encoder", "decoder"):
        sinusoids = checkpoint["model_state"][f"{stack_name}.pe.pe"]
        checkpoint["model_state"][f"{stack_name}.pe.pe"] = sinusoids[:, :9].clone()
    torch.save(checkpoint, folder / "best.ckpt")


def main(kinds: list[str]) -> None:
    """Make all checkpoints of some kinds."""
    for kind in kinds:
        for folder in PEERS.glob(f"{kind}*"):
            shutil.rmtree(folder)
    with tempfile.TemporaryDirectory() as work:
        corpus = Path(work) / "corpus"
        corpus.mkdir()
        write_corpus(corpus)
        cut(corpus)
        for name, flags in FAIRSEQ.items() if "fairseq" in kinds else ():
            make_fairseq(name, flags, corpus, Path(work))
        for name, flags in OPENNMT.items() if "opennmt" in kinds else ():
            make_opennmt(name, flags, corpus, Path(work))
        for name, settings in JOEYNMT.items() if "joeynmt" in kinds else ():
            # the names of files in a configuration are relative to this folder
            with contextlib.chdir(corpus):
                make_joeynmt(name, *settings, corpus)


if __name__ == "__main__":
    main(sys.argv[1:])
