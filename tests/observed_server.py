"""The command `serve`, whose translations a test can observe, hold and let fail.

`python observed_server.py FOLDER ARGUMENTS...` adds a line to `FOLDER/events` for each request that
waits ("put") or ends ("drop"), and for each call of the pipeline, with its number of sentences. A
call waits while `FOLDER/hold` exists, and fails with its text while `FOLDER/fail` exists.
"""

import sys
import time
from pathlib import Path

from vanilla_transformer.cli import main
from vanilla_transformer.serving.models import Model
from vanilla_transformer.serving.translation_queue import TranslationQueue

FOLDER = Path(sys.argv[1])


def note(event):
    with (FOLDER / "events").open("a", encoding="utf-8") as file:
        file.write(f"{event}\n")


def observed(name, function):
    def observing(self, job):
        function(self, job)
        note(name)

    return observing


def translate(self, sentences, *rest):
    note(len(sentences))
    while (FOLDER / "hold").exists():
        time.sleep(0.01)
    if (FOLDER / "fail").exists():
        raise RuntimeError(f"this cannot be translated: {sentences[0]}")
    return TRANSLATE(self, sentences, *rest)


TRANSLATE = Model.translate
Model.translate = translate
for name in ("put", "drop"):
    setattr(TranslationQueue, name, observed(name, getattr(TranslationQueue, name)))
sys.exit(main(["serve", *sys.argv[2:]]))
