"""The tokenizer: one byte-level BPE vocabulary for source and target. Section 5.1.

This file is copied to the Hub without the package, so it imports nothing from the package.
"""

import json
import re
import unicodedata
from os import PathLike
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from transformers import TokenizersBackend

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
BYTE_SYMBOLS = frozenset(pre_tokenizers.ByteLevel.alphabet())
# the pattern by which ByteLevel splits a text
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class VanillaTransformerTokenizer(TokenizersBackend):
    """Tokenizer with one byte-level BPE vocabulary for both languages. Section 5.1.

    Every text can be encoded. Decoding returns the text, normalized to Unicode's NFC, with every
    space, line break and control character. A word has the same tokens at the start of a text and
    after a space. The end token follows every text, unless `add_eos_token` or the post-processor
    was changed. The name of a special token inside a text is encoded like other text, unless
    `split_special_tokens` is off. A saved tokenizer keeps a changed normalizer, pre-tokenizer,
    post-processor and decoder of its `backend_tokenizer`.

    Without arguments the vocabulary has only special tokens and single bytes;
    `train_new_from_iterator` learns a new vocabulary.

    Args:
        vocab: Id of every token, with the special tokens and the byte alphabet.
        merges: Pairs of tokens to merge, in order of priority.
        pad_token: Padding token.
        bos_token: First input of the decoder.
        eos_token: End token.
        unk_token: Unknown token. No text is encoded with it, but the library needs its id.
        split_special_tokens: Encode the name of a special token inside a text like other text.
        symbols: Words of a formal language, such as the brackets of a linearized tree. Each is one
            token wherever it stands between spaces, and is decoded like other words.
        **kwargs: Arguments of every tokenizer of the library.

    Raises:
        ValueError: If the vocabulary is missing, or lacks a special token, a byte or a symbol.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    model = BPE

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        merges: list[tuple[str, str]] | None = None,
        pad_token: str | AddedToken | None = SPECIAL_TOKENS[0],
        bos_token: str | AddedToken | None = SPECIAL_TOKENS[1],
        eos_token: str | AddedToken | None = SPECIAL_TOKENS[2],
        unk_token: str | AddedToken | None = SPECIAL_TOKENS[3],
        split_special_tokens: bool = True,
        symbols: list[str] | None = None,
        **kwargs,
    ):
        symbol_tokens = [symbol_token(symbol) for symbol in symbols or []]
        if vocab is None:
            path = kwargs.get("name_or_path")
            if path and not (kwargs.get("tokenizer_file") or kwargs.get("tokenizer_object")):
                raise ValueError(f"{path} must hold a tokenizer.json, got none.")
            tokens = (*SPECIAL_TOKENS, *sorted(BYTE_SYMBOLS), *symbol_tokens)
            vocab = {token: index for index, token in enumerate(tokens)}
        self._tokenizer = _make_backend(vocab, merges or [], symbols or [])
        for component in ("normalizer", "pre_tokenizer", "decoder"):
            if component in kwargs:
                setattr(self._tokenizer, component, kwargs.pop(component))
        post_processor = _given_post_processor(kwargs)
        added_settings: dict[str, bool] = {}
        if post_processor is None:
            kwargs.setdefault("add_eos_token", True)
        else:
            # the library saves the post-processor, but not the settings that made it
            added_settings = {
                name: kwargs.pop(name)
                for name in ("add_bos_token", "add_eos_token")
                if name in kwargs
            }
        super().__init__(
            pad_token=pad_token,
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            split_special_tokens=split_special_tokens,
            symbols=symbols,
            **kwargs,
        )
        self.symbols = list(symbols or [])
        if post_processor is not None:
            self._read_added_tokens(added_settings)
        self._refuse_missing_tokens(
            [str(token) for token in (pad_token, bos_token, eos_token, unk_token)],
            [str(token) for token in kwargs.get("added_tokens_decoder", {}).values()],
        )

    def _refuse_missing_tokens(self, named_tokens: list[str], added_tokens: list[str]):
        # the library would give a missing token the next free id, which is outside of the model's
        # embedding. This is refused for the default names; a caller with other names wants new ids
        known_tokens = {*self._tokenizer.get_vocab(with_added_tokens=False), *added_tokens}
        missing_tokens = [
            token for token in named_tokens if token in SPECIAL_TOKENS and token not in known_tokens
        ]
        if missing_tokens:
            raise ValueError(
                f"the vocabulary must hold the special tokens {', '.join(SPECIAL_TOKENS)}, "
                f"got {len(known_tokens)} tokens without {', '.join(missing_tokens)}."
            )
        if not known_tokens.issuperset(BYTE_SYMBOLS):
            raise ValueError(
                f"the vocabulary must hold all {len(BYTE_SYMBOLS)} byte symbols, so that no text "
                f"is unknown, got {len(known_tokens.intersection(BYTE_SYMBOLS))}."
            )
        missing_symbols = [
            symbol for symbol in self.symbols if symbol_token(symbol) not in known_tokens
        ]
        if missing_symbols:
            raise ValueError(
                f"the vocabulary must hold every symbol, got none of {', '.join(missing_symbols)}."
            )

    @classmethod
    def convert_to_native_format(cls, **kwargs) -> dict[str, Any]:
        # code from the Hub gets this argument. With it, the library would load the whole file, and
        # a special token that a user has added would no longer be found in texts
        kwargs.pop("trust_remote_code", None)
        settings = super().convert_to_native_format(**kwargs)
        file = kwargs.get("tokenizer_file")
        if file is not None and Path(file).is_file():
            # the library returns only the vocabulary, the merges and the post-processor
            backend = Tokenizer.from_file(str(file))
            settings["normalizer"] = backend.normalizer
            settings["pre_tokenizer"] = backend.pre_tokenizer
            if not _has_default_decoder(backend):
                settings["decoder"] = backend.decoder
        return settings

    def _read_added_tokens(self, settings: dict[str, bool]):
        """Read from the post-processor which tokens every text gets, then apply given settings."""
        added_tokens = self._tokenizer.encode("").tokens
        _, old_bos, old_eos, _ = SPECIAL_TOKENS
        self._add_bos_token = not {old_bos, self.bos_token}.isdisjoint(added_tokens)
        self._add_eos_token = not {old_eos, self.eos_token}.isdisjoint(added_tokens)
        named_tokens = {
            self.bos_token: self._add_bos_token,
            self.eos_token: self._add_eos_token,
        }
        is_renamed = any(
            is_added and token not in added_tokens for token, is_added in named_tokens.items()
        )
        if settings or is_renamed:
            self._add_bos_token = settings.get("add_bos_token", self._add_bos_token)
            self._add_eos_token = settings.get("add_eos_token", self._add_eos_token)
            self.update_post_processor()

    def _add_tokens(
        self, new_tokens: list[str] | list[AddedToken], special_tokens: bool = False
    ) -> int:
        # with split_special_tokens the backend finds no special token in a text. This is right for
        # the named tokens, but a token that a user adds, such as a language tag, must be found. So
        # the backend stores an added token as an ordinary one, and only this class marks it as
        # special. The backend searches the normalized text for added tokens: otherwise it would
        # treat the text after such a token as the start of a text
        named_tokens = {*SPECIAL_TOKENS, *map(str, self._special_tokens_map.values())}
        tokens = []
        for token in new_tokens:
            added_token = token if isinstance(token, AddedToken) else AddedToken(token)
            token_state = added_token.__getstate__()
            is_named = token_state["content"] in named_tokens
            token_state |= {"special": is_named, "normalized": not is_named}
            tokens.append(AddedToken(**token_state))
            if special_tokens and not is_named and str(token) not in self.extra_special_tokens:
                self._extra_special_tokens.append(tokens[-1])
        # `symbols` is set after super().__init__, which adds the tokens of a saved tokenizer: these
        # tokens are not checked
        if hasattr(self, "symbols"):
            self._refuse_byte_symbols([token for token in tokens if str(token) not in named_tokens])
        has_default_decoder = _has_default_decoder(self._tokenizer)
        num_added = self._tokenizer.add_tokens(tokens)
        if has_default_decoder:
            self._tokenizer.decoder = _default_decoder(self._tokenizer)
        return num_added

    def _refuse_byte_symbols(self, tokens: list[AddedToken]):
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        for token in (unicodedata.normalize("NFC", str(token)) for token in tokens):
            if _is_of_byte_symbols(token) and token in vocab:
                text = self._tokenizer.decode([vocab[token]])
                raise ValueError(
                    f"token {token!r} cannot be added: the vocabulary has the same token for "
                    f"{text!r}. Add it with a character before or after it."
                )

    def __setstate__(self, state: dict):
        self.__dict__.update(state)
        # the pickled state of the backend does not contain this setting
        self._tokenizer.encode_special_tokens = self.split_special_tokens

    def backend_for_others(self) -> Tokenizer:
        """Return the backend for programs that do not know this class.

        Returns:
            A copy in which all special tokens are marked as special, also those that a user has
            added, so that `decode` can skip them.
        """
        definition = json.loads(self._tokenizer.to_str())
        special_tokens = {str(token) for token in self._extra_special_tokens}
        for token in definition["added_tokens"]:
            token["special"] |= token["content"] in special_tokens
        return Tokenizer.from_str(json.dumps(definition))

    def save_pretrained(self, save_directory: str | PathLike, *args, **kwargs) -> tuple[str, ...]:
        """Save the tokenizer as transformers does.

        Args:
            save_directory: Output folder.
            args: Arguments of `save_pretrained` of transformers.
            kwargs: Arguments of `save_pretrained` of transformers.

        Returns:
            Names of the files.
        """
        addresses = self.init_kwargs.get("auto_map", {})
        class_address = next(filter(None, addresses.get("AutoTokenizer", [])), "")
        class_file = Path(save_directory, f"{class_address.partition('.')[0]}.py")
        if "--" in class_address or self._auto_class is not None or class_file.is_file():
            return super().save_pretrained(save_directory, *args, **kwargs)
        # loaded by the installed class, which is saved without its code
        self.init_kwargs.pop("auto_map", None)
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            if addresses:
                self.init_kwargs["auto_map"] = addresses

    def _save_pretrained(self, save_directory: str | PathLike, *args, **kwargs) -> tuple[str, ...]:
        names = super()._save_pretrained(save_directory, *args, **kwargs)
        if self._extra_special_tokens:
            self.backend_for_others().save(names[-1])
            # with split_special_tokens, another class would not find the added special tokens in a
            # text, so its settings must not contain it
            prefix = Path(names[-1]).name.removesuffix("tokenizer.json")
            path = Path(save_directory, f"{prefix}tokenizer_config.json")
            settings = json.loads(path.read_text(encoding="utf-8"))
            if settings.get("split_special_tokens"):
                del settings["split_special_tokens"]
                text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
                path.write_text(text, encoding="utf-8")
        return names

    def _decode(
        self, token_ids: int | list[int], skip_special_tokens: bool = False, **kwargs
    ) -> str:
        if skip_special_tokens and self.extra_special_tokens:
            skipped_ids = set(self.extra_special_tokens_ids)
            ids = [token_ids] if isinstance(token_ids, int) else token_ids
            token_ids = [index for index in ids if index not in skipped_ids]
        return super()._decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)


def _make_backend(
    vocab: dict[str, int], merges: list[tuple[str, str]], symbols: list[str]
) -> Tokenizer:
    """Make a backend with the normalizer, the pre-tokenizer and the decoder of this class."""
    # merges do not lead to a symbol, so with `ignore_merges` BPE first looks up the whole word
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=bool(symbols)))
    # the pre-tokenizer puts a space before a text that begins without one, and the normalizer
    # doubles a space at the beginning, so that the decoder can always remove one space
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\A "), "  ")]
    )
    # Metaspace puts the space, because add_prefix_space of ByteLevel would also put one after
    # every token that a user adds. The pattern of ByteLevel separates letters from punctuation, so
    # that no merges make a special token
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False),
            *_split_at_symbols(symbols),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not symbols),
        ]
    )
    backend.decoder = _default_decoder(backend)
    return backend


def _given_post_processor(settings: dict[str, Any]) -> processors.PostProcessor | None:
    """Return the post-processor of a saved or trained backend, or None."""
    if (post_processor := settings.get("post_processor")) is not None:
        return post_processor
    backend = settings.get("tokenizer_object")
    file = settings.get("tokenizer_file")
    if backend is None and file is not None and Path(file).is_file():
        backend = Tokenizer.from_file(str(file))
    return None if backend is None else backend.post_processor


def _default_decoder(backend: Tokenizer) -> decoders.Decoder:
    """Return the decoder of this class for the added tokens of a backend."""
    # ByteLevel decodes every character as the symbol of a byte, also in a token that a user has
    # added, such as Zürich. So each such token is first replaced by the symbols of its bytes
    vocab = backend.get_vocab(with_added_tokens=False)
    added_tokens = {
        unicodedata.normalize("NFC", str(token))
        for token in backend.get_added_tokens_decoder().values()
    }
    added_token_steps = [
        decoders.Replace(Regex(f"^{re.escape(token)}$"), _byte_symbols(token))
        for token in sorted(added_tokens)
        if _is_of_byte_symbols(token) and token not in vocab
    ]
    return decoders.Sequence(
        [*added_token_steps, decoders.ByteLevel(), decoders.Strip(" ", left=1, right=0)]
    )


def _has_default_decoder(backend: Tokenizer) -> bool:
    """Return False if a user has changed the decoder of a backend."""
    decoder, default = backend.decoder, _default_decoder(backend)
    return decoder is not None and decoder.__getstate__() == default.__getstate__()


def symbol_token(symbol: str) -> str:
    """Return the token of a symbol.

    Args:
        symbol: Word without a space.

    Returns:
        Token, written in the byte symbols of ByteLevel.

    Raises:
        ValueError: If the symbol is not a word.
    """
    if not isinstance(symbol, str) or not re.fullmatch(r"\S+", symbol):
        raise ValueError(f"symbols must be words without a space, got {symbol!r}.")
    return _byte_symbols(f" {symbol}")


def _byte_symbols(text: str) -> str:
    """Replace each byte of a text in UTF-8 by the character that ByteLevel uses for this byte."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level.pre_tokenize_str(text)[0][0]


def _is_of_byte_symbols(token: str) -> bool:
    """Return whether ByteLevel could read the characters of a token as symbols of other bytes."""
    return not token.isascii() and BYTE_SYMBOLS.issuperset(token)


def _split_at_symbols(symbols: list[str]) -> list[pre_tokenizers.PreTokenizer]:
    if not symbols:
        return []
    # every word has a space before it, also the first word, which gets one from Metaspace
    symbol_pattern = f" (?:{'|'.join(map(re.escape, symbols))})(?=\\s|\\z)"
    return [pre_tokenizers.Split(Regex(f"{symbol_pattern}|{WORDS}"), "isolated")]


__all__ = ["VanillaTransformerTokenizer"]
