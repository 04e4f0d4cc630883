"""Queue of translation jobs. Jobs with the same model and languages are translated together."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from transformers import StoppingCriteriaList

from ..batches_vanilla_transformer import TOKENS_PER_BATCH
from ..search_vanilla_transformer import WholeSearchCriteria
from .models import Model, Translation


@dataclass(eq=False)
class Job:
    """Sentences of a request, which wait for their translations.

    Attributes:
        model: Model that translates the sentences.
        source: Language of the sentences.
        target: Language of the translations.
        num_translations: Number of translations of each sentence.
        is_aligned: Whether the words of the translations are aligned.
        sentences: Sentences, none of them empty.
        num_tokens: Number of source tokens of all sentences together.
        translations: Future of the translations of each sentence, best first.
        is_cancelled: Whether the client has disconnected or the request has timed out.
    """

    model: Model
    source: str
    target: str
    num_translations: int
    is_aligned: bool
    sentences: Sequence[str]
    num_tokens: int
    translations: "Future[list[list[Translation]]]" = field(default_factory=Future)
    is_cancelled: bool = False

    def can_join(self, other: "Job") -> bool:
        """Return whether one call of the pipeline can translate this job and another one.

        Args:
            other: Another job.
        """
        return self.model is other.model and self._settings() == other._settings()

    def _settings(self) -> tuple[str, str, int, bool]:
        return self.source, self.target, self.num_translations, self.is_aligned


class StopIfCancelled(WholeSearchCriteria):
    """Stopping criterion that ends a search if all its jobs are cancelled.

    Args:
        jobs: Jobs of the search.
    """

    def __init__(self, jobs: Sequence[Job]):
        self.jobs = jobs

    def is_met(self) -> bool:
        """Return whether all jobs are cancelled."""
        return all(job.is_cancelled for job in self.jobs)


class TranslationQueue:
    """Queue of jobs, and the thread that translates the jobs, the oldest first.

    One call of the pipeline translates the oldest job, and with it later jobs that can join it if
    the tokens of all these jobs fit into one batch.
    """

    def __init__(self):
        # an ordered set, not a queue, because a job can be removed before its turn
        self._waiting_jobs: dict[Job, None] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="translation", daemon=True)
        self._thread.start()

    def put(self, job: Job):
        """Add a job.

        Args:
            job: New job; `translations` gets its translations, or the error of the search.
        """
        # mark the future as running: it then cannot be cancelled, so its result can always be set
        job.translations.set_running_or_notify_cancel()
        with self._changed:
            self._waiting_jobs[job] = None
            self._changed.notify()

    def drop(self, job: Job):
        """Remove a job that is cancelled or finished.

        Args:
            job: Job of this queue.
        """
        with self._changed:
            job.is_cancelled = True
            self._waiting_jobs.pop(job, None)

    def close(self):
        """End the thread after it has translated the waiting jobs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self):
        while jobs := self._take_jobs():
            # after an error of several jobs, translate each job alone, so that only the job with
            # the error fails
            if not _translate(jobs):
                for job in jobs:
                    _translate([job])

    def _take_jobs(self) -> list[Job]:
        """Wait for jobs, and remove those of the next call; [] if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_jobs or self._is_closed)
            taken_jobs: list[Job] = []
            num_tokens = 0
            for job in list(self._waiting_jobs):
                fits_into_batch = num_tokens + job.num_tokens <= TOKENS_PER_BATCH
                if not taken_jobs or (fits_into_batch and job.can_join(taken_jobs[0])):
                    taken_jobs.append(job)
                    num_tokens += job.num_tokens
                    del self._waiting_jobs[job]
            return taken_jobs


def _translate(jobs: Sequence[Job]) -> bool:
    """Translate jobs in one call; after an error of several jobs, set no result, return False."""
    oldest_job = jobs[0]
    try:
        translations = oldest_job.model.translate(
            [sentence for job in jobs for sentence in job.sentences],
            oldest_job.source,
            oldest_job.target,
            oldest_job.num_translations,
            oldest_job.is_aligned,
            StoppingCriteriaList([StopIfCancelled(jobs)]),
        )
    # `except Exception` would miss a panic of a Rust library, and the thread would end
    except BaseException as error:
        if len(jobs) > 1:
            return False
        oldest_job.translations.set_exception(error)
        return True
    remaining_translations = iter(translations)
    for job in jobs:
        job.translations.set_result(list(islice(remaining_translations, len(job.sentences))))
    return True
