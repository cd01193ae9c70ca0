"""How good predicted texts are, as percentages, by well-kept libraries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from forestream.errors import DataError

ROUGE: Final = ("rouge1", "rougeLsum")
EXACT_MATCH: Final = ("exact_match",)

_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """ROUGE-1 and ROUGE-LSum, F1 with stemming: the best over an example's references, then the mean, in
    percent.

    LSum needs sentences: text is cut at line breaks and after ``.``, ``!`` or ``?`` before white space. That
    needs no model, and cuts after an abbreviation too, so figures may differ by hundredths from those of a
    trained splitter.

    Args:
        predictions: one text per example; an empty one counts zero.
        references: for each example, one or more texts.

    Raises:
        DataError: there are no predictions, the two lengths differ, an example has no reference, or
            ``rouge-score`` is not installed.
    """
    _check(predictions, references)
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise DataError(
            "ROUGE needs the package 'rouge-score', which is not installed; run: pip install rouge-score"
        ) from error
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [
        scorer.score_multi([_lines(target) for target in targets], _lines(prediction))
        for prediction, targets in zip(predictions, references, strict=True)
    ]
    return {name: 100.0 * fmean(float(score[name].fmeasure) for score in scores) for name in ROUGE}


def exact_match(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The share of predictions that equal one of their references, in percent.

    Runs of white space count as one space and one final semicolon is dropped; nothing else is changed, so
    letter case and quotes count.

    Raises:
        DataError: there are no predictions, the two lengths differ, or an example has no reference.
    """
    _check(predictions, references)
    hits = [
        _plain(prediction) in {_plain(target) for target in targets}
        for prediction, targets in zip(predictions, references, strict=True)
    ]
    return {"exact_match": 100.0 * sum(hits) / len(hits)}


def _check(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if len(predictions) != len(references):
        raise DataError(
            f"found {len(predictions)} predictions and {len(references)} examples; expected one prediction "
            "for each example, in the same order"
        )
    if not predictions:
        raise DataError("found no predictions; a score needs at least one")
    for index, targets in enumerate(references):
        if isinstance(targets, str) or not targets:
            raise DataError(f"example {index} has {targets!r} for references; expected a sequence of one or more texts")


def _lines(text: str) -> str:
    return _SENTENCE_END.sub("\n", text.strip())


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(";").rstrip()
