"""Parallel corpus of the demo: English and German sentences around data from Unicode's CLDR.

Dates, times, money, units, numbers, relative times and lists come from CLDR through Babel. Number
words come from num2words. The short sentences around them show where word order and endings of the
two languages differ. Each English sentence has exactly one translation.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, time, timedelta
from functools import cache
from itertools import islice
from random import Random
from string import Formatter
from typing import Any, Literal

from babel import Locale
from babel.dates import format_date, format_skeleton, format_timedelta, get_timezone_location
from babel.lists import format_list
from babel.numbers import format_currency, format_decimal, format_percent, get_currency_name
from babel.units import format_unit
from datasets import Dataset, DatasetDict, Features, Translation
from num2words import num2words

Pair = tuple[str, str]
_Unit = Literal["hour", "day", "week", "month"]

# number of random draws before the search for new pairs ends
_MAX_DRAWS = 100_000
# smallest number of occurrences in the training split, for each word of validation and test
_MIN_OCCURRENCES = 3

# templates: each English line is followed by its German line. {name} is a slot; {name2} is filled
# from the same list as {name}, but with another value
_LINES = """
{date_full}
{date_full}
Date: {date_medium}
Datum: {date_medium}
Date and time: {date_medium}, {time}
Datum und Uhrzeit: {date_medium}, {time}
Valid until: {date_short}
Gültig bis: {date_short}
Departure: {time}, arrival: {time2}
Abfahrt: {time}, Ankunft: {time2}
Today is {date_today}.
Heute ist {date_today}.
Yesterday was {weekday}, {month_day}.
Gestern war {weekday}, der {month_day}.
The meeting is on {date_long}.
Die Besprechung ist am {date_long}.
The meeting on {weekday} begins at {daytime}.
Die Besprechung am {weekday} beginnt um {daytime} Uhr.
{name} was born on {date_long} in {city}.
{name} wurde am {date_long} in {city} geboren.
The contract is valid until {date_long}.
Der Vertrag gilt bis zum {date_long}.
Please answer by {date_long}.
Bitte antworten Sie bis zum {date_long}.
The letter of {date_medium} arrived on {weekday}.
Der Brief vom {date_medium} ist am {weekday} angekommen.
Your order of {date_short} was shipped on {weekday}.
Ihre Bestellung vom {date_short} wurde am {weekday} verschickt.
The exhibition opens on {month_day} and runs for {stay}.
Die Ausstellung wird am {month_day} eröffnet und dauert {stay}.
In {month_year}, {person} moved to {city}.
Im {month_year} ist {person} nach {city} gezogen.
It often rains in {city} in {month}.
Im {month} regnet es in {city} oft.
The report for the {quarter} will be published on {weekday}.
Der Bericht für das {quarter} wird am {weekday} veröffentlicht.
{person} has a birthday on the {ordinal} of {month}.
{person} hat am {ordinal}n {month} Geburtstag.
Today is the {ordinal} of {month}.
Heute ist der {ordinal} {month}.
The museum in {city} is closed on {on_weekdays}.
Das Museum in {city} ist {on_weekdays} geschlossen.
On {on_weekdays}, {person} takes the bus at {time}.
{on_weekdays} nimmt {person} den Bus um {time} Uhr.
Do you have time on {weekday} at {daytime}?
Haben Sie am {weekday} um {daytime} Uhr Zeit?
The house in {city} was built in {year}.
Das Haus in {city} wurde {year} gebaut.
The shop is open from {weekday} to {weekday2}, from {morning} to {evening}.
Das Geschäft ist von {weekday} bis {weekday2} von {morning} bis {evening} Uhr geöffnet.
The course in {city} takes place on {weekdays}.
Der Kurs in {city} findet am {weekdays} statt.
It is {time} in {far_city}.
In {far_city} ist es {time} Uhr.
The train to {city} leaves at {time} from platform {track}.
Der Zug nach {city} fährt um {time} Uhr von Gleis {track} ab.
{person} says that the train to {city} leaves at {time}.
{person} sagt, dass der Zug nach {city} um {time} Uhr abfährt.
{person} gets up at {morning} every day.
{person} steht jeden Tag um {morning} Uhr auf.
{name}, please wake me at {morning}.
{name}, bitte weck mich um {morning} Uhr.
The film begins at {evening} and lasts {minutes}.
Der Film beginnt um {evening} Uhr und dauert {minutes}.
The train from {city} to {city2} takes {hours} and {minutes}.
Der Zug von {city} nach {city2} braucht {hours} und {minutes}.
The bus from {city} arrives in {minutes}.
Der Bus aus {city} kommt in {minutes} an.
{ahead}, {person} is flying to {far_city}.
{ahead} fliegt {person} nach {far_city}.
{person} moved to {city} {ago}.
{person} ist {ago} nach {city} gezogen.
The package was sent from {city} {ago}.
Das Paket wurde {ago} aus {city} abgeschickt.
{person} hopes that the package from {city} will arrive {ahead}.
{person} hofft, dass das Paket aus {city} {ahead} ankommt.
{person} stayed in {city} for {stay}.
{person} blieb {stay} in {city}.
{person} comes {from_country}.
{person} kommt {from_country}.
{person} is flying {to_country} on {weekday}.
{person} fliegt am {weekday} {to_country}.
Next year, {person} is traveling {to_country}.
Nächstes Jahr reist {person} {to_country}.
Last year, {person} visited {countries}.
Letztes Jahr hat {person} {countries} besucht.
Would you rather live in {countries_or}?
Möchten Sie lieber in {countries_or} leben?
The goods come {from_country} and are sold in {countries}.
Die Waren kommen {from_country} und werden in {countries} verkauft.
{name} comes {from_country} and speaks {languages}.
{name} kommt {from_country} und spricht {languages}.
{person} speaks {languages}.
{person} spricht {languages}.
{person} wants to learn {languages_or}.
{person} möchte {languages_or} lernen.
The instructions are available in {languages}.
Die Anleitung gibt es auf {languages}.
The book was translated from {tongue} into {tongue2}.
Das Buch wurde aus dem {tongue}en ins {tongue2}e übersetzt.
In summer, {person} is going to {cities}.
Im Sommer fährt {person} nach {cities}.
The bank exchanges {currencies}.
Die Bank wechselt {currencies}.
Total: {price}
Gesamtbetrag: {price}
{thing} costs {price}.
{thing} kostet {price}.
{person} bought {thing_object} for {price}.
{person} hat {thing_object} für {price} gekauft.
The flight from {city} to {far_city} costs {price}.
Der Flug von {city} nach {far_city} kostet {price}.
With a discount of {percent}, {thing} costs only {price}.
Mit einem Rabatt von {percent} kostet {thing} nur {price}.
{person} has {money} in the bank.
{person} hat {money} auf der Bank.
{person} owes me {money}.
{person} schuldet mir {money}.
Although the ticket costs {price}, {person} wants to go to {city}.
Obwohl die Fahrkarte {price} kostet, will {person} nach {city} fahren.
Prices rose by {percent} in {month}.
Die Preise stiegen im {month} um {percent}.
{percent} of the guests come {from_country}.
{percent} der Gäste kommen {from_country}.
{person} has read {percent} of the book.
{person} hat {percent} des Buches gelesen.
It is another {distance} to {city}.
Bis {city} sind es noch {distance}.
The bridge is {meters} long and was opened in {year}.
Die Brücke ist {meters} lang und wurde {year} eröffnet.
{thing} weighs {weight}.
{thing} wiegt {weight}.
The tank holds {volume}.
In den Tank passen {volume}.
Today it is {degrees} in {city}.
Heute sind es in {city} {degrees}.
Temperature in {city}: {celsius}
Temperatur in {city}: {celsius}
The car drove through {city} at {speed}.
Das Auto fuhr mit {speed} durch {city}.
The apartment has {area} and costs {rent} a month.
Die Wohnung hat {area} und kostet {rent} im Monat.
The town has {number} inhabitants.
Die Stadt hat {number} Einwohner.
{person} is {count} years old.
{person} ist {count} Jahre alt.
At the party there were {count} guests {from_country}.
Beim Fest waren {count} Gäste {from_country}.
{name}, open the book at page {count}.
{name}, schlag das Buch auf Seite {count} auf.
{person} knows that {sum}.
{person} weiß, dass {sum}.
There are {many} books in the library of {city}.
In der Bibliothek von {city} stehen {many} Bücher.
{person} has won {many} euros.
{person} hat {many} Euro gewonnen.
The story begins in {city} in {year_words}.
Die Geschichte beginnt im Jahr {year_words} in {city}.
On {date_on}, {person} is flying from {city} to {far_city} for {price}.
Am {date_on}, fliegt {person} für {price} von {city} nach {far_city}.
If it rains on {weekday}, we will meet at {daytime} in the museum.
Wenn es am {weekday} regnet, treffen wir uns um {daytime} Uhr im Museum.
The conference in {city} begins on {date_long} at {morning} and lasts {stay}.
Die Konferenz in {city} beginnt am {date_long} um {morning} Uhr und dauert {stay}.
{name} comes {from_country}, lives in {city}, and speaks {languages}.
{name} kommt {from_country}, wohnt in {city} und spricht {languages}.
{person} says that the party in {city} begins on {weekday} at {evening} and that guests from \
{countries} are coming.
{person} sagt, dass das Fest in {city} am {weekday} um {evening} Uhr beginnt und dass Gäste aus \
{countries} kommen.
Because the flight on {date_on}, was too expensive, {person} is taking the train from {city} to \
{city2} at {time} for {price}.
Weil der Flug am {date_on}, zu teuer war, nimmt {person} um {time} Uhr für {price} den Zug von \
{city} nach {city2}.
""".strip().split("\n")
_TEMPLATES = list(zip(_LINES[::2], _LINES[1::2], strict=True))

# slots that join two or three values of another slot by a CLDR list pattern
_LISTS: dict[str, tuple[str, Literal["standard", "or"]]] = {
    "cities": ("city", "standard"),
    "countries": ("country", "standard"),
    "countries_or": ("country", "or"),
    "currencies": ("currency", "standard"),
    "languages": ("language", "standard"),
    "languages_or": ("language", "or"),
    "weekdays": ("weekday", "standard"),
}

_NAMES = "Anna Ben Clara David Emma Felix Hannah Jonas Laura Max Nina Oscar Sophia Thomas"
_CITIES = (
    "Amsterdam Athens Belgrade Berlin Brussels Bucharest Budapest Copenhagen Dublin Helsinki "
    "Lisbon London Luxembourg Madrid Moscow Oslo Paris Prague Riga Rome Stockholm Vienna Vilnius "
    "Warsaw Zurich"
)
_FAR_CITIES = (
    "Africa/Algiers Africa/Cairo Africa/Nairobi America/Bogota America/Chicago America/Havana "
    "America/Lima America/Los_Angeles America/Mexico_City America/New_York America/Toronto "
    "Asia/Baghdad Asia/Bangkok Asia/Beirut Asia/Damascus Asia/Hong_Kong Asia/Jerusalem Asia/Seoul "
    "Asia/Shanghai Asia/Singapore Asia/Tehran Asia/Tokyo Australia/Sydney"
)
_COUNTRIES = (
    "AT AU BE BG BR CA CL CN CO CZ DE DK EE EG ES ET FI FR GR HR HU IE IN IS IT JP KE KR LT LV MA "
    "MX NG NO NZ PE PL PT RO SE SI TH TN VN ZA"
)
_COUNTRIES_FEMININE = "CH MN SK TR UA"
_COUNTRIES_PLURAL = {
    "NL": ("in die Niederlande", "aus den Niederlanden"),
    "PH": ("auf die Philippinen", "von den Philippinen"),
    "US": ("in die Vereinigten Staaten", "aus den Vereinigten Staaten"),
}
_CURRENCIES = "AUD BRL CAD CHF CZK DKK EUR GBP HUF INR JPY MXN NOK PLN SEK TRY USD ZAR"
_LANGUAGES = (
    "ar bg bn cs da de el en es et fi fr he hi hr hu is it ja ko lt lv nl no pl pt ro ru sk sl sr "
    "sv sw tr uk vi zh"
)
_THINGS = [
    ("the bicycle", "das Fahrrad", "das Fahrrad"),
    ("the camera", "die Kamera", "die Kamera"),
    ("the chair", "der Stuhl", "den Stuhl"),
    ("the clock", "die Uhr", "die Uhr"),
    ("the desk", "der Schreibtisch", "den Schreibtisch"),
    ("the lamp", "die Lampe", "die Lampe"),
    ("the mirror", "der Spiegel", "den Spiegel"),
    ("the radio", "das Radio", "das Radio"),
    ("the suitcase", "der Koffer", "den Koffer"),
    ("the telescope", "das Fernrohr", "das Fernrohr"),
]


class _RenderedPairs(Sequence[Pair]):
    """Values in both languages, each rendered when it is read: a corpus draws few of all dates."""

    def __init__(self, render: Callable[[Any, str], str], values: Iterable[Any]):
        self._values = tuple(values)
        self._render = cache(render)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        value = self._values[index]
        return self._render(value, "en"), self._render(value, "de")


def _render_units(
    unit: str, amounts: Iterable[float], length: Literal["long", "short"] = "long"
) -> Sequence[Pair]:
    return _RenderedPairs(
        lambda amount, locale: format_unit(amount, unit, length, locale=locale), amounts
    )


def _spell_out_numbers(numbers: Iterable[int], kind: str = "cardinal") -> Sequence[Pair]:
    return _RenderedPairs(lambda number, locale: num2words(number, lang=locale, to=kind), numbers)


def _render_dates(width: str, days: list[date]) -> Sequence[Pair]:
    return _RenderedPairs(lambda day, locale: format_date(day, width, locale), days)


def _render_date_skeletons(skeleton: str, days: list[date]) -> Sequence[Pair]:
    return _RenderedPairs(lambda day, locale: format_skeleton(skeleton, day, locale=locale), days)


def _render_dates_with_article(article: str, days: list[date]) -> Sequence[Pair]:
    def render(day: date, locale: str) -> str:
        full_date = format_date(day, "full", locale)
        if locale == "en":
            return full_date
        # in a German sentence a date after a weekday has an article: "Sonntag, der 3. März 2024"
        return f"{full_date.split(', ')[0]}, {article} {format_date(day, 'long', locale)}"

    return _RenderedPairs(render, days)


def _date_slots() -> dict[str, Sequence[Pair]]:
    days = [date(2005, 1, 1) + timedelta(number) for number in range(20 * 365)]
    first_days = [day for day in days if day.day == 1]
    weekdays = _RenderedPairs(
        lambda day, locale: Locale(locale).days["format"]["wide"][day], range(7)
    )
    return {
        "date_full": _render_dates("full", days),
        "date_long": _render_dates("long", days),
        "date_medium": _render_dates("medium", days),
        "date_short": _render_dates("short", days),
        "date_today": _render_dates_with_article("der", days),
        "date_on": _render_dates_with_article("dem", days),
        "weekday": weekdays,
        "on_weekdays": [(f"{english}s", f"{german.lower()}s") for english, german in weekdays],
        "month": _RenderedPairs(
            lambda number, locale: Locale(locale).months["format"]["wide"][number], range(1, 13)
        ),
        "month_day": _render_date_skeletons("MMMMd", days[:365]),
        "month_year": _render_date_skeletons("yMMMM", first_days),
        "quarter": _render_date_skeletons("yQQQQ", first_days[::3]),
        "ordinal": _spell_out_numbers(range(1, 32), "ordinal"),
        "year": [(str(year), str(year)) for year in range(1900, 2026)],
        "year_words": _spell_out_numbers(range(1950, 2000), "year"),
    }


def _render_relative_times(direction: int) -> Sequence[Pair]:
    time_spans: list[tuple[_Unit, timedelta]] = [
        *(("hour", timedelta(hours=count)) for count in range(2, 24)),
        *(("day", timedelta(days=count)) for count in range(2, 15)),
        *(("week", timedelta(weeks=count)) for count in range(2, 9)),
        *(("month", timedelta(days=30 * count)) for count in range(2, 12)),
    ]

    def render(time_span: tuple[_Unit, timedelta], locale: str) -> str:
        # no span reaches this threshold, above which Babel takes a larger unit: with its default,
        # 23 hours would become 1 day
        unit, delta = time_span
        return format_timedelta(direction * delta, unit, 1e9, add_direction=True, locale=locale)

    return _RenderedPairs(render, time_spans)


def _time_slots() -> dict[str, Sequence[Pair]]:
    minutes = range(0, 24 * 60, 5)
    clock_times = [
        # the English skeleton "hm" has a plain space before AM and PM, as people type it; Babel's
        # time formats have a narrow no-break space
        (format_skeleton("hm", moment, locale="en"), format_skeleton("Hm", moment, locale="de"))
        for moment in (time(minute // 60, minute % 60) for minute in minutes)
    ]
    stay_units = [("duration-day", 31), ("duration-week", 9), ("duration-month", 12)]
    return {
        "time": clock_times,
        "daytime": clock_times[len(clock_times) // 3 : len(clock_times) * 5 // 6],
        "morning": clock_times[len(clock_times) // 4 : len(clock_times) // 2],
        "evening": clock_times[len(clock_times) * 2 // 3 :],
        "hours": _render_units("duration-hour", range(2, 10)),
        "minutes": _render_units("duration-minute", range(5, 60)),
        "stay": [pair for unit, end in stay_units for pair in _render_units(unit, range(2, end))],
        "ahead": _render_relative_times(1),
        "ago": _render_relative_times(-1),
    }


def _place_slots() -> dict[str, Sequence[Pair]]:
    def city(zone: str, locale: str) -> str:
        return get_timezone_location(zone, locale=locale, return_city=True)

    def territory(code: str, locale: str) -> str:
        return Locale(locale).territories[code]

    plain_countries = _RenderedPairs(territory, _COUNTRIES.split())
    feminine_countries = _RenderedPairs(territory, _COUNTRIES_FEMININE.split())
    plural_countries = [
        (f"the {territory(code, 'en')}", *german) for code, german in _COUNTRIES_PLURAL.items()
    ]
    return {
        "city": _RenderedPairs(city, [f"Europe/{name}" for name in _CITIES.split()]),
        "far_city": _RenderedPairs(city, _FAR_CITIES.split()),
        "country": plain_countries,
        "to_country": [
            *((f"to {english}", f"nach {german}") for english, german in plain_countries),
            *((f"to {english}", f"in die {german}") for english, german in feminine_countries),
            *((f"to {english}", to) for english, to, _ in plural_countries),
        ],
        "from_country": [
            *((f"from {english}", f"aus {german}") for english, german in plain_countries),
            *((f"from {english}", f"aus der {german}") for english, german in feminine_countries),
            *((f"from {english}", origin) for english, _, origin in plural_countries),
        ],
    }


def _people_and_things_slots() -> dict[str, Sequence[Pair]]:
    language_pairs = _RenderedPairs(
        lambda code, locale: Locale(locale).languages[code], _LANGUAGES.split()
    )
    name_pairs = [(name, name) for name in _NAMES.split()]
    return {
        "name": name_pairs,
        "person": [*name_pairs, ("she", "sie"), ("he", "er")],
        "thing": [(english, nominative) for english, nominative, _ in _THINGS],
        "thing_object": [(english, accusative) for english, _, accusative in _THINGS],
        "language": language_pairs,
        "tongue": [pair for pair in language_pairs if pair[1].endswith("sch")],
    }


def _amount_slots() -> dict[str, Sequence[Pair]]:
    prices = [
        (whole + cents, currency)
        for whole in [*range(2, 100), *range(100, 2000, 25)]
        for cents in (0, 0.5, 0.95)
        for currency in ("EUR", "USD", "GBP")
    ]
    amounts = [
        (amount, currency)
        for amount in [*range(2, 100), *range(100, 2000, 25)]
        for currency in ("EUR", "USD", "CHF")
    ]
    half_steps = [number / 2 for number in range(4, 100)]
    return {
        "price": _RenderedPairs(_render_money, prices),
        "rent": _RenderedPairs(_render_money, [(amount, "EUR") for amount in range(400, 2000, 10)]),
        "money": _RenderedPairs(_render_money_with_currency_name, amounts),
        "currency": _RenderedPairs(
            lambda code, locale: get_currency_name(code, 2, locale), _CURRENCIES.split()
        ),
        "percent": _RenderedPairs(_render_percent, half_steps),
        "distance": _render_units("length-kilometer", range(15, 2000, 5)),
        "meters": _render_units("length-meter", range(20, 500)),
        "weight": _render_units("mass-kilogram", half_steps),
        "volume": _render_units("volume-liter", range(10, 200)),
        "degrees": _render_units("temperature-celsius", range(2, 40)),
        "celsius": _render_units("temperature-celsius", range(-15, 40), "short"),
        "speed": _render_units("speed-kilometer-per-hour", range(20, 200), "short"),
        "area": _render_units("area-square-meter", range(20, 200)),
        "track": [(str(number), str(number)) for number in range(1, 25)],
        "number": _RenderedPairs(
            lambda number, locale: format_decimal(number, locale=locale), range(1100, 99_900, 100)
        ),
        "count": _spell_out_numbers(range(2, 100)),
        "many": _spell_out_numbers([*range(100, 1000, 10), *range(1000, 21_000, 1000)]),
        "sum": _render_sums(),
    }


def _render_money(amount: tuple[float, str], locale: str) -> str:
    number, currency = amount
    return format_currency(number, currency, locale=locale)


def _render_money_with_currency_name(amount: tuple[int, str], locale: str) -> str:
    number, currency = amount
    return f"{format_decimal(number, locale=locale)} {get_currency_name(currency, number, locale)}"


def _render_percent(percent: float, locale: str) -> str:
    return format_percent(percent / 100, locale=locale, decimal_quantization=False)


def _render_sums() -> Sequence[Pair]:
    # in German the verb is at the end, because the sum follows "dass" in its template
    number_words = dict(enumerate(_spell_out_numbers(range(1, 101)), start=1))
    sums = [
        *((a, ("plus", "plus"), b, a + b) for a in range(2, 40) for b in range(2, 20)),
        *((a, ("minus", "minus"), b, a - b) for a in range(21, 60) for b in range(2, 20)),
        *((a, ("times", "mal"), b, a * b) for a in range(2, 11) for b in range(2, 11)),
    ]
    return [
        (
            f"{number_words[a][0]} {sign[0]} {number_words[b][0]} is {number_words[result][0]}",
            f"{number_words[a][1]} {sign[1]} {number_words[b][1]} {number_words[result][1]} ist",
        )
        for a, sign, b, result in sums
    ]


@cache
def _values_by_slot() -> dict[str, Sequence[Pair]]:
    return {
        **_date_slots(),
        **_time_slots(),
        **_place_slots(),
        **_people_and_things_slots(),
        **_amount_slots(),
    }


def _fill_slot(slot: str, filled_slots: dict[str, Pair], rng: Random) -> Pair:
    if slot in _LISTS:
        item, style = _LISTS[slot]
        items = rng.sample(_values_by_slot()[item], rng.choice((2, 3)))
        english, german = zip(*items, strict=True)
        return format_list(english, style, "en"), format_list(german, style, "de")
    base_slot = slot.removesuffix("2")
    pair = rng.choice(_values_by_slot()[base_slot])
    while pair == filled_slots.get(base_slot):
        pair = rng.choice(_values_by_slot()[base_slot])
    return pair


def _draw_pair(rng: Random) -> Pair:
    english, german = rng.choice(_TEMPLATES)
    filled_slots: dict[str, Pair] = {}
    for _, slot, _, _ in Formatter().parse(english):
        if slot is not None:
            filled_slots[slot] = _fill_slot(slot, filled_slots, rng)
    source = english.format(**{slot: pair[0] for slot, pair in filled_slots.items()})
    target = german.format(**{slot: pair[1] for slot, pair in filled_slots.items()})
    return source[0].upper() + source[1:], target[0].upper() + target[1:]


def _draw_distinct_pairs(seed: int) -> Iterator[Pair]:
    rng, sources, targets = Random(seed), set(), set()
    for _ in range(_MAX_DRAWS):
        source, target = _draw_pair(rng)
        if source not in sources and target not in targets:
            sources.add(source)
            targets.add(target)
            yield source, target


def _split_words(text: str) -> list[str]:
    # each digit is a word: most numbers of validation and test do not occur in the training split,
    # but all digits do
    return re.findall(r"[^\W\d_]+|\d|[^\w\s]", text)


def build_demo_corpus(
    seed: int = 0, train: int = 24_000, validation: int = 500, test: int = 500
) -> DatasetDict:
    """Draw an English-German corpus in the schema of WMT14. The same arguments give the same text.

    No sentence of either language occurs twice, within a split or across splits. Every word of
    validation and test occurs several times in train; the digits of a number count as words.

    Args:
        seed: Seed of the random choice of sentences.
        train: Number of sentence pairs in the training split.
        validation: Number of sentence pairs in the validation split.
        test: Number of sentence pairs in the test split.

    Returns:
        Splits "train", "validation" and "test", with the single column "translation".

    Raises:
        ValueError: If a size is below 1, or fewer pairs are found than the sum of the sizes.
    """
    split_sizes = {"train": train, "validation": validation, "test": test}
    for split, size in split_sizes.items():
        if size < 1:
            raise ValueError(f"{split} must be at least 1, got {size}.")
    distinct_pairs = _draw_distinct_pairs(seed)
    train_pairs = list(islice(distinct_pairs, train))
    # count the words of each language apart: "Name" in English and in German are different words
    word_counts = [
        Counter(word for pair in train_pairs for word in _split_words(pair[side]))
        for side in (0, 1)
    ]
    evaluation_candidates = (
        pair
        for pair in distinct_pairs
        if all(
            word_counts[side][word] >= _MIN_OCCURRENCES
            for side in (0, 1)
            for word in _split_words(pair[side])
        )
    )
    evaluation_pairs = list(islice(evaluation_candidates, validation + test))
    if len(evaluation_pairs) < validation + test:
        raise ValueError(
            "train, validation and test must together be at most "
            f"{len(train_pairs) + len(evaluation_pairs)}, the number of pairs without repetition "
            f"and new words, got {sum(split_sizes.values())}."
        )
    splits = {
        "train": train_pairs,
        "validation": evaluation_pairs[:validation],
        "test": evaluation_pairs[validation:],
    }
    features = Features({"translation": Translation(languages=["de", "en"])})
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {"translation": [{"de": german, "en": english} for english, german in split_pairs]},
                features=features,
            )
            for split, split_pairs in splits.items()
        }
    )
