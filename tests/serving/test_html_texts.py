"""HTML of the server: texts to translate, and markup around their translations."""

import html
import re
import time
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer.serving.html_texts import HtmlTexts, aligned_text

FRAGMENTS = [
    *(
        "<p>",
        "</p>",
        "<b>",
        "</b>",
        "<a href='x?a=1&amp;b=2'>",
        "</a>",
        "<br>",
        "<img src=x>",
        "<i/>",
    ),
    *(
        "<pre>",
        "</pre>",
        "<code>",
        "</code>",
        "<script>",
        "</script>",
        "<p translate=no>",
        "<!-- -->",
    ),
    *(
        "one ",
        "two",
        " three.",
        "&amp;",
        "&lt;",
        "&nbsp;",
        "&#233;",
        "<",
        ">",
        "&",
        "\n",
        "é",
        "<![",
    ),
    *("<!DOCTYPE html>", "<?php", "]]>", "</", "<b", '"', "='", "&#xD800;", "\0"),
]


def in_order(text):
    """Translate to capital letters, and align each word with itself."""
    return aligned_text([text], [text.upper()], [[(it, it) for it in range(len(text.split()))]])


def translated(fragment, translate=in_order):
    texts = HtmlTexts(fragment)
    return texts.join([translate(text) for text in texts.texts])


class Words(HTMLParser):
    """Visible words of HTML, and its tags."""

    def __init__(self, fragment):
        super().__init__()
        self.words, self.tags = "", []
        self.feed(fragment)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(attrs)))

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")

    def handle_data(self, data):
        self.words += data


@pytest.mark.parametrize(
    ("fragment", "texts", "expected"),
    [
        ("the cat", ["the cat"], "THE CAT"),
        ("", [], ""),
        ("a < b &amp; c", ["a < b & c"], "A &lt; B &amp; C"),
        ("<p>one</p><p class='x'>two</p>", ["one", "two"], "<p>ONE</p><p class='x'>TWO</p>"),
        ("one<br>two<hr/>", ["one", "two"], "ONE<br>TWO<hr/>"),
        # a line break in the source is a space
        ("<p>\n  the\n  cat </p>\n", ["\n  the cat "], "<p>\n  THE CAT </p>\n"),
        ("<pre>a\n  b</pre>", ["a\n  b"], "<pre>A\n  B</pre>"),
        # tags around the whole text
        ("<p><b><i>cat</i></b></p>", ["cat"], "<p><b><i>CAT</i></b></p>"),
        ("<b>unclosed", ["unclosed"], "<b>UNCLOSED"),
        ("</b>stray", ["stray"], "</b>STRAY"),
        ("one <b>two</i> three", ["one ", "two", " three"], "ONE <b>TWO</i> THREE"),
        ("<b>one<br>two</b>", ["one", "two"], "<b>ONE<br>TWO</b>"),
        ("<b>one <i>two</b> three</i>", ["one ", "two", " three"], "<b>ONE <i>TWO</b> THREE</i>"),
        ("<!-- no --><style>p > a {}</style>yes", ["yes"], "<!-- no --><style>p > a {}</style>YES"),
        ("<![CDATA[no]]>yes", ["yes"], "<!--[CDATA[no]]-->YES"),
        ("run <code>a &lt; b</code> now", ["run ", " now"], "RUN <code>a &lt; b</code> NOW"),
        ("<p translate=no>no <b>no</b></p>yes", ["yes"], "<p translate=no>no <b>no</b></p>YES"),
        ("<i class='notranslate a'>no</i> yes", [" yes"], "<i class='notranslate a'>no</i> YES"),
        (
            "<p translate=no><img>no</p>yes<br translate=no>yes",
            ["yes", "yes"],
            "<p translate=no><img>no</p>YES<br translate=no>YES",
        ),
        # tags within a sentence
        ("the <b>red</b> cat", ["the red cat"], "THE <b>RED</b> CAT"),
        ("<b>The</b> cat <a>sat</a>.", ["The cat sat."], "<b>THE</b> CAT <a>SAT</a>."),
        ("a <b>b <i>c</i> <u>d</u></b>!", ["a b c d!"], "A <b>B <i>C</i> <u>D</u></b>!"),
        ("see <a>(x)</a>, <a>y</a>", ["see (x), y"], "SEE <a>(X)</a>, <a>Y</a>"),
        ("x <q>y.</q> z", ["x y. z"], "X <q>Y.</q> Z"),
        ("hi <img src=a> you <wbr/>", ["hi  you "], "HI  <img src=a>YOU <wbr/>"),
        ("one<span> </span>two", ["one two"], "ONE <span></span>TWO"),
    ],
)
def test_texts_are_translated_and_markup_is_kept(fragment, texts, expected):
    assert HtmlTexts(fragment).texts == texts
    assert translated(fragment) == expected


@pytest.mark.parametrize(
    ("translation", "pairs", "expected"),
    [
        ("Das sah ich.", [2, 1, 0], "<a>Das</a> sah <b>ich</b>."),
        ("ich < sah das.", [0, 1, 1, 2], "<b>ich</b> &lt; sah <a>das</a>."),
        ("Ich habe das da gesehen.", [0, 1, 2, 2, 1], "<b>Ich</b> habe <a>das da</a> gesehen."),
        # the longest run of words
        ("Ich da sah das hier.", [0, 2, 1, 2, 2], "<b>Ich</b> da sah <a>das hier</a>."),
        # a word without alignment is taken from the same share of the sentence
        ("Sah das.", [1, 2], "<b>Sah</b> <a>das</a>."),
        ("Sah.", [1], "<b>Sah</b><a></a>."),
        ("", [], "<b></b><a></a>"),
    ],
)
def test_tags_are_put_around_the_words_that_are_aligned(translation, pairs, expected):
    texts = HtmlTexts("<p><b>I</b> saw <a>that</a>.</p>")
    assert texts.needs_alignment
    (text,) = texts.texts
    word_pairs = [(source, target) for target, source in enumerate(pairs)]
    found = texts.join([aligned_text([text], [translation], [word_pairs])])
    assert found == f"<p>{expected}</p>"


@pytest.mark.parametrize(
    ("translation", "pairs", "expected"),
    [
        ("eins drei zwei", [0, 2, 1], "<b>eins drei <i>zwei</i></b>"),
        ("zwei drei eins", [1, 2, 0], "<b><i>zwei</i></b> drei eins"),
    ],
)
def test_an_element_contains_its_children(translation, pairs, expected):
    texts = HtmlTexts("<b>one <i>two</i></b> three")
    word_pairs = [(source, target) for target, source in enumerate(pairs)]
    found = texts.join([aligned_text(texts.texts, [translation], [word_pairs])])
    assert found == expected


def test_words_are_aligned_in_several_sentences():
    texts = HtmlTexts("One two. <b>Three</b> four.\n")
    assert texts.texts == ["One two. Three four.\n"]
    parts, translated_parts = (
        ["One two. ", "Three four.", "\n"],
        ["Zwei eins. ", "Vier drei.", "\n"],
    )
    # a word pair beyond the words of the sentence counts nothing
    pairs = [[(1, 0), (0, 1)], [(1, 0), (0, 1), (7, 1), (0, 7)]]
    found = texts.join([aligned_text(parts, translated_parts, pairs)])
    assert found == "Zwei eins. Vier <b>drei</b>.\n"


def test_elements_can_be_nested_to_any_depth():
    fragment = f"x {'<b>' * 1500}y{'</b>' * 1500} z"
    assert translated(fragment).casefold() == fragment


@pytest.mark.parametrize("fragment", ["x", "<p><b>x</b></p>", "<p>x<br>y</p>", "x <b>y", ""])
def test_only_tags_within_a_sentence_need_an_alignment(fragment):
    assert not HtmlTexts(fragment).needs_alignment


def test_a_translation_never_becomes_markup():
    for fragment in ("x", "<title>x</title>", "x <b>y</b> z", "x <b><i>y</i></b> z"):
        found = translated(fragment, lambda text: in_order(f"<script>{text}&amp;"))
        assert Words(found).tags == Words(fragment).tags
        assert "<SCRIPT>" in Words(found).words


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
def test_markup_of_any_kind_is_read(fragment):
    texts = HtmlTexts(fragment)
    found = texts.join([in_order(text) for text in texts.texts])
    # each tag is still there, and each word
    tags = re.compile(r"</?[a-z]+")
    assert sorted(tags.findall(found)) == sorted(tags.findall(translated(found)))
    assert translated(found) == found
    if "<![" not in fragment:
        assert sorted(map(str, Words(found).tags)) == sorted(map(str, Words(fragment).tags))
        assert Words(found).words.upper().split() == Words(fragment).words.upper().split()


@pytest.mark.parametrize(
    "part", ["<b>", "<p>", "</b>", "<b>x", "<b>x</b> ", "<", "<!--", "<![", "&"]
)
def test_the_time_grows_with_the_length(part):
    start = time.monotonic()
    translated(part * (5000 // len(part)))
    assert time.monotonic() - start < 5


def test_the_library_unescapes_what_the_server_escapes():
    assert html.unescape(translated("&quot;a&quot; &amp; 'b'")) == "\"A\" & 'B'"
