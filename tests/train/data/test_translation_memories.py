"""Translation memories in TMX: languages, codes inside of texts, and files that are none."""

import gzip
import time

import pytest
from corpus_files import memory, unit

from vanilla_transformer.train.data import translation_memories
from vanilla_transformer.train.data.translation_memories import read_memory


def read(path, content, languages=("en", "de")):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [tuple(pair[it] for it in languages) for pair in read_memory(path, languages)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.tmx"


def test_a_language_stands_for_its_regions(path):
    units = [
        unit(("en-US", "a"), ("de-AT", "b")),
        unit(("DE", "d"), ("EN_gb", "c")),
        unit(("eng", "no"), ("en", "e"), ("den", "no"), ("de-CH-1996", "f")),
    ]
    assert read(path, memory(*units)) == [("a", "b"), ("c", "d"), ("e", "f")]
    found = read(path, memory(unit(("pt-PT", "a"), ("pt-BR", "b"))), ("pt-BR", "pt-PT"))
    assert found == [("b", "a")]


@pytest.mark.parametrize(
    ("languages", "tags"),
    [
        (("de", "de-CH"), ("de", "de-CH")),
        (("de-CH", "de"), ("de_ch", "de-AT")),
        (("zh", "zh-TW"), ("zh-CN", "zh-TW")),
        (("zh_Hant", "zh"), ("zh-Hant-HK", "zh-Hans")),
    ],
)
def test_a_text_belongs_to_the_language_with_the_longest_code(languages, tags, path):
    source, target = tags
    units = [unit((source, "a"), (target, "b")), unit((target, "d"), (source, "c"))]
    assert read(path, memory(*units), languages) == [("a", "b"), ("c", "d")]


def test_codes_are_left_out_and_marked_text_is_kept(path):
    text = (
        'The <bpt i="1" type="bold">&lt;b></bpt>big<ept i="1">&lt;/b></ept> <hi>red</hi> '
        'car<ph x="2">&lt;img alt="<sub>a <hi>red</hi> car</sub>"/></ph><it pos="end"/> '
        "<ut>x</ut>&amp; <![CDATA[<you>]]>"
    )
    assert read(path, memory(unit(("en", text), ("de", "b")))) == [("The big red car & <you>", "b")]


def test_a_line_break_in_a_text_is_a_space(path):
    text = "The big\n      red \r\n\tcar  is\u2028new."
    found = read(path, memory(unit(("en", text), ("de", "b&#10;c\u00a0&#13;&#10;d"))))
    assert found == [("The big red car  is\u2028new.", "b c\u00a0 d")]


def test_every_text_of_a_unit_is_in_a_pair(path):
    units = [unit(("en", "a"), ("en-GB", "b"), ("de", "c"), ("de-AT", "d"), ("fr", "no"))]
    assert read(path, memory(*units)) == [("a", "c"), ("a", "d"), ("b", "c")]


def test_a_side_that_is_missing_in_a_unit_is_none(path):
    units = [unit(("en", "a"), ("fr", "b")), unit(("fr", "c")), unit(("en", "d"), ("de", "e"))]
    assert read(path, memory(*units)) == [("a", None), ("d", "e")]


def test_the_attribute_and_the_encoding_of_old_programs_are_read(path):
    text = memory(unit(("en", "a"), ("de", "ä"))).replace("xml:lang", "lang")
    assert read(path, text) == [("a", "ä")]
    assert read(path, text.replace("UTF-8", "UTF-16").encode("utf-16")) == [("a", "ä")]
    assert read(path, text.replace("UTF-8", "windows-1252").encode("cp1252")) == [("a", "ä")]


def test_a_language_that_is_not_there_is_refused_with_those_that_are(path):
    text = memory(unit(("en-US", "a"), ("fr", "b")), unit(("cs", "c")))
    with pytest.raises(ValueError, match=r"x\.tmx must have texts in 'de', got cs, en-US, fr\."):
        read(path, text)
    with pytest.raises(ValueError, match="must have texts in 'de' and 'en', got no texts"):
        read(path, memory())


WHOLE = memory(*(unit(("en", f"a{number}"), ("de", "b")) for number in range(50)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE[: len(WHOLE) // 2], "a complete TMX file, got XML with (unclosed|no element)"),
        (
            WHOLE.removesuffix("</body></tmx>\n"),
            "a complete TMX file, got XML with no element found",
        ),
        ("", "a complete TMX file, got XML with no element found"),
        ("en\tde\na\tb\n", "a complete TMX file, got XML with syntax error: line 1, column 0"),
        ("<html><body/></html>", "a TMX file, got XML of the kind 'html'"),
        (WHOLE.replace("a7<", "a7&nbsp;<"), "a TMX file that declares no entities, got 'nbsp'"),
        (WHOLE.replace("UTF-8", "GB2312"), "XML in UTF-8, .*, got: multi-byte encodings are not"),
        (WHOLE.replace("UTF-8", "ucs-2"), "XML in UTF-8, .*, got: unknown encoding: ucs-2"),
        (
            WHOLE.encode().replace(b"a7", b"\xe9"),
            "a complete TMX file, got XML with not well-formed",
        ),
    ],
)
def test_a_file_that_is_cut_or_no_memory_is_refused(content, message, path):
    with pytest.raises(ValueError, match=rf"x\.tmx must be {message}"):
        read(path, content)


def test_a_packed_memory_that_is_cut_is_refused(tmp_path):
    packed = gzip.compress(WHOLE.encode())
    with pytest.raises(ValueError, match=r"x\.tmx\.gz cannot be read to its end"):
        read(tmp_path / "x.tmx.gz", packed[: len(packed) // 2])


def test_entities_do_no_harm(path, tmp_path):
    (tmp_path / "secret").write_text("never", encoding="utf-8")
    bomb = '<!ENTITY a0 "haha">' + "".join(
        f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 30)
    )
    for declared in (
        bomb,
        '<!ENTITY a29 SYSTEM "secret">',
        '<!ENTITY % a29 SYSTEM "secret"> %a29;',
    ):
        text = memory(unit(("en", "&a29;"), ("de", "b")))
        text = text.replace('tmx SYSTEM "tmx14.dtd"', f"tmx [{declared}]")
        began = time.monotonic()
        with pytest.raises(
            ValueError, match="must be a TMX file that declares no entities, got 'a"
        ):
            read(path, text)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "start", ["<tmx><tu><seg>", "<tmx><!--", "<tmx><tu a='", "<tmx>" + "<tu><tuv>" * 99]
)
def test_a_unit_of_any_length_is_refused_in_bounded_memory(start, path, monkeypatch):
    monkeypatch.setattr(translation_memories, "BYTES_PER_READ", 1000)
    monkeypatch.setattr(translation_memories, "MAX_RECORD_BYTES", 5000)
    reads = 0

    class Endless:
        def read(self, size):
            nonlocal reads
            reads += 1
            assert reads < 20
            return start.encode() if reads == 1 else b"x" * size

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(translation_memories, "opened", lambda path: Endless())
    with pytest.raises(ValueError, match=r"must have units of at most 5,000 bytes, got a longer"):
        list(read_memory(path, ("en", "de")))
