"""Text with a wrong encoding is found, and correct text is not."""

import pytest

from vanilla_transformer.train.data.mojibake import GARBLED

# in these languages words in capitals end with letters that are frequent in garbled text
SENTENCES = [
    "Le château de la reine est à côté du théâtre, où l\u2019été dure plus longtemps.",
    "Il a goûté la crème brûlée : « un délice » !",
    "À la fête, les élèves étaient très fâchés ; leur maître dîna sûrement.",
    "A irmã do capitão alemão chegou amanhã de manhã à estação.",
    "A maçã e o pão são da avó; o avô não tem “coração”.",
    "Não há amanhã sem hoje, disse a cidadã.",
    "În fața mănăstirii, bătrânul își încălzește mâinile.",
    "Pâinea și brânza costă 20 de lei… „Atât”, zâmbi țăranul.",
    "Hà Nội là thủ đô của nước Việt Nam, cách biển hơn 100 km.",
    "Xã hội đã thay đổi; cả nhà đều khỏe \u2013 bà và mẹ tôi cũng vậy.",
    "Câu hỏi của thầy giáo rất khó, nhưng trò đã trả lời được.",
]
# punctuation that can follow a word
AFTER = [
    "»",
    "”",
    "\u2019",
    "\xa0: 12",
    "\xa0!",
    "°",
    "°C",
    "§ 3",
    "²",
    "®",
    "™",
    "…",
    "\u2013",
    "\xad",
    " «A»",
]


def test_words_in_capitals_are_not_garbled():
    texts = [sentence.upper() for sentence in SENTENCES]
    words = sorted({word.strip(".,;:!?«»“”„…\u2013") for text in texts for word in text.split()})
    endings = {word[-1:] for word in words}
    assert {"Ã", "Â", "À", "Ô", "Ă"} & endings >= {"Ã", "À", "Ă"}
    words += ["Â", "Ã", "ALEMÃ", "XÃ", "PÂ", "S\xc2", "NÃO", "Ă"]
    texts += [f"{before}{word}{after}" for word in words for after in AFTER for before in ("", "«")]
    wrong = [text for text in texts if GARBLED.search(text)]
    assert not wrong


def test_garbled_words_are_found_in_small_letters_and_mostly_in_capitals():
    def found(texts):
        # some bytes are undefined in Windows-1252
        garbled = [text.encode().decode("cp1252", errors="replace") for text in texts]
        whole = [text for text in garbled if "\ufffd" not in text]
        return sum(bool(GARBLED.search(text)) for text in whole), len(whole)

    words = {word.strip(".,;:!?") for sentence in SENTENCES[:6] for word in sentence.split()}
    words = [word for word in words if word.isalpha() and not word.isascii()]
    num_found, num_words = found(words)
    assert num_found == num_words > 25
    num_found, num_words = found([word.upper() for word in words])
    assert num_found >= 0.8 * num_words > 15


@pytest.mark.parametrize(
    "text",
    ["Où ?", "N° 5", "Nº 7", "¿Qué?", "20 °C", "siehe § 3", "Il va à Paris", "à", "Óscar", "œuvre"],
)
def test_a_single_garbled_symbol_is_found(text):
    assert not GARBLED.search(text)
    assert GARBLED.search(text.encode().decode("cp1252"))
