"""Search of CTranslate2 in an exported folder."""

import ctranslate2
import torch


def gnmt_score(log_probability, length, alpha=0.6):
    """Divide by the length penalty of section 6.1."""
    return log_probability / ((5 + length) / 6) ** alpha


class InCTranslate2:
    """Exported folder in CTranslate2, from token ids to token ids."""

    def __init__(self, folder, tokenizer, longest=12, compute_type="default"):
        self.longest = longest
        # CTranslate2 sets the threads of the whole process, torch's included
        threads = torch.get_num_threads()
        self.translator = ctranslate2.Translator(
            str(folder), intra_threads=threads, compute_type=compute_type
        )
        self.tokenizer = tokenizer

    def tokens(self, ids):
        return self.tokenizer.convert_ids_to_tokens(ids)

    def ids(self, tokens):
        return self.tokenizer.convert_tokens_to_ids(tokens)

    def translate(self, texts, **search):
        sources = [self.tokens(ids) for ids in self.tokenizer(texts)["input_ids"]]
        return self.translator.translate_batch(
            sources, max_decoding_length=self.longest, max_batch_size=32, **search
        )

    def paper_search(self, texts):
        """Rank all hypotheses by the length penalty of section 6.1."""
        found = self.translate(
            texts,
            beam_size=4,
            patience=4,
            num_hypotheses=16,
            # with 0, the search would end with the first hypothesis
            length_penalty=1e-6,
            return_scores=True,
        )
        return [
            max(
                zip(result.scores, result.hypotheses, strict=True),
                key=lambda pair: gnmt_score(pair[0], len(pair[1]) + 1),
            )[1]
            for result in found
        ]
