"""A model's own answers to a task's prompts, written down to be learned from: what lossless streams have to foretell.

A file of answers is JSON Lines. The first line says what the answers depend on and where they come from; every other
line is one answer: the row's index, a print of the prompt's ids, the ids that were written, their text, and why it
ended. Lines are added whole, group by group, so a run that was stopped is gone on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import PreTrainedTokenizerBase

from forestream.bases import fingerprint, load_base
from forestream.config import Compile, JsonConfig, SamplingSettings, StreamConfig, whole
from forestream.data import Tokens, prompt_ids, template_of
from forestream.errors import ConfigError, DataError
from forestream.generation import Generator
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.steps import Counters
from forestream.tasks.base import Example

FORMAT: Final = 1


@dataclass(frozen=True)
class AnswerSettings(JsonConfig):
    """What answers depend on: those of one file have all of it in common.

    Attributes:
        task, split: whose prompts.
        fingerprint: of the base model's weights.
        chat_template: print of the template that the prompts were rendered with; None of prompts in plain text.
        dtype: of weights and activations.
        max_new_tokens: cap; an answer that meets it has no end-of-text token.
        temperature: 0 is greedy.
        seed: of the order in which rows are taken, and of the draws, which also depend on the row's index.
    """

    task: str
    split: str
    fingerprint: str
    chat_template: str | None
    dtype: str
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole("max_new_tokens", self.max_new_tokens, 1)
        _ = self.sampling

    @property
    def sampling(self) -> SamplingSettings:
        """The law that answers are drawn from."""
        return SamplingSettings(temperature=self.temperature, seed=self.seed)

    @staticmethod
    def read(path: Path, task: str) -> AnswerSettings:
        """The settings in the first line of a file of answers to the prompts of `task`.

        Raises:
            DataError: the file is missing, is none of answers in this format, or is of another task.
        """
        settings, _ = _read(path)
        if settings.task != task:
            raise DataError(
                f"{path} answers prompts of {settings.task}; expected {task}, or give --task {settings.task}"
            )
        return settings


def base_generator(
    base: str, dtype: torch.dtype, device: str = "cpu", compile: Compile = "off"
) -> tuple[Generator, str]:
    """A base model without any adapter, prepared for plain decoding, and the fingerprint of its weights.

    Raises:
        ConfigError: the base cannot be had, or compiling is asked for and there is no compiler.
        UnsupportedModel: the host cannot be driven exactly.
    """
    # As where adapters are loaded: float16 cannot hold every bfloat16 number, and buffers keep their dtype.
    host, tokenizer = load_base(base, torch.float32 if dtype == torch.float16 else dtype)
    found = fingerprint(host)
    for parameter in host.parameters():
        parameter.data = parameter.data.to(dtype)
    model = StreamingLM(host, StreamConfig(streams=0, stream_layers=1, scorer_rank=0)).to(device).eval()
    model.prepare(compile)
    return Generator(model, tokenizer), found


@dataclass(frozen=True)
class Written:
    """What one run added to a file of answers.

    Attributes:
        counters: of the answers that were written now.
        left_out: prompts that fill the model's context, so that there is no room for an answer.
    """

    counters: Counters
    left_out: int


def write_answers(
    generator: Generator,
    examples: Mapping[int, Example],
    path: Path,
    settings: AnswerSettings,
    provenance: Mapping[str, Any],
    batch_size: int = 4,
    advance: Callable[[int], None] = lambda done: None,
) -> Written:
    """Answer `examples`, given by index in the order to take them, and add the answers to `path` as they come.

    Drafts are used where the generator's adapter has streams. Those that the file holds already are not written again;
    prompts that fill the model's context are left out.

    Args:
        batch_size: prompts that are answered together.
        advance: called with the number of examples done since the last call, for a progress bar.

    Raises:
        DataError: the file holds answers of other settings or to other prompts, or is none of answers.
        ConfigError: the generator's adapter changes what its base writes.
    """
    if generator.model.stream_config.mode == "joint" and generator.model.stream_config.streams:
        raise ConfigError(
            "found a joint adapter, which writes another text than its base; give a lossless one, or none"
        )
    prompts = {index: prompt_ids(generator.tokenizer, example.asked) for index, example in examples.items()}
    done = _resume(path, settings, provenance, prompts)
    fitting = [i for i, ids in prompts.items() if len(ids) < generator.model.port.room(len(ids))]
    waiting = [i for i in fitting if i not in done]
    advance(len(prompts) - len(waiting))
    counters = Counters()
    method: Literal["forestream", "plain"] = "forestream" if generator.model.stream_config.streams else "plain"
    with path.open("a", encoding="utf-8") as file:
        for first in range(0, len(waiting), batch_size):
            group = waiting[first : first + batch_size]
            # A draw depends on the row's index, not on its mates: greedy or not, batches change nothing in float32.
            requests = [
                Request(prompts[i], generator.eos, settings.sampling, max_new_tokens=settings.max_new_tokens, row=i)
                for i in group
            ]
            lines = []
            for index, one in zip(group, generator.generate_batch(requests, method), strict=True):
                counters.merge(one.counters)
                line = {
                    "index": index,
                    "prompt": _print(prompts[index]),
                    "completion": list(one.tokens),
                    "text": one.text,
                    "finish": one.finish,
                }
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
            file.write("".join(lines))
            file.flush()
            advance(len(group))
    return Written(counters, len(prompts) - len(fitting))


def read_answers(
    path: Path, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, base_fingerprint: str
) -> list[Tokens]:
    """Answers as they are trained on, in the order of the file; ids are those that were written, never made anew.

    An answer that was cut off at the cap has no end-of-text token, so that nothing is taught to end there.

    Args:
        examples: all rows of the split that the answers are to, in order.
        base_fingerprint: of the model that is going to be trained.

    Raises:
        DataError: the file is missing, malformed or empty, is of the test split, or was written by another base, with
            another chat template, or to other prompts.
    """
    settings, answers = _read(path)
    if settings.split == "test":
        raise DataError(f"{path} answers the test split, which is there to measure with; distill another split")
    if settings.fingerprint != base_fingerprint:
        raise DataError(
            f"{path} was written by a base with fingerprint {settings.fingerprint[:12]}, and the one to train has "
            f"{base_fingerprint[:12]}; train the same base, or distill this one's own answers"
        )
    if settings.chat_template != (found := template_of(tokenizer, examples)):
        raise DataError(
            f"{path} was written with chat template {_short(settings.chat_template)}, and the base to train has "
            f"{_short(found)}; give the tokenizer the same template, or distill anew"
        )
    tokens = []
    for answer in answers:
        if answer.index >= len(examples):
            raise DataError(
                f"{path} answers row {answer.index}, and there are {len(examples)} rows; give the same data"
            )
        prompt = prompt_ids(tokenizer, examples[answer.index].asked)
        _compare(path, answer, prompt)
        tokens.append(Tokens(prompt, answer.completion))
    if not tokens:
        raise DataError(f"{path} holds no answer yet; let `forestream distill` write some")
    return tokens


@dataclass(frozen=True)
class _Answer:
    """A line of the file; `prompt` is the print of the prompt's ids."""

    index: int
    prompt: str
    completion: tuple[int, ...]
    text: str
    finish: str

    @staticmethod
    def of(line: dict[str, Any]) -> _Answer:
        """Raises:
        TypeError, ValueError: the line is of another form.
        """
        if set(line) != {field.name for field in fields(_Answer)}:
            raise ValueError(f"it has the fields {', '.join(sorted(line)) or 'none'}")
        if not isinstance(line["index"], int) or line["index"] < 0:
            raise ValueError(f"its index is {line['index']!r}")
        ids = line["completion"]
        if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError("its completion is no list of token ids")
        return _Answer(**{**line, "completion": tuple(ids)})


def _read(path: Path) -> tuple[AnswerSettings, list[_Answer]]:
    """Settings and answers; what stands behind the last whole line is left out."""
    try:
        data = path.read_bytes()
        text = data[: data.rfind(b"\n") + 1].decode()
    except FileNotFoundError as error:
        raise DataError(f"found no file {path}; expected answers that `forestream distill` wrote") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} could not be read ({error}); expected answers that `forestream distill` wrote"
        ) from error
    first, *lines = text.split("\n")  # not splitlines(): texts hold other separators
    try:
        head = json.loads(first)
        if head["format"] != FORMAT:
            raise DataError(f"{path} has format {head['format']!r}; this version reads format {FORMAT}")
        settings = AnswerSettings.from_dict(head["settings"])
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"the first line of {path} is none that `forestream distill` wrote ({error})") from error
    answers = []
    for number, line in enumerate(lines[:-1], start=2):
        try:
            answers.append(_Answer.of(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise DataError(f"line {number} of {path} is no answer: {error}; distill into another file") from error
    return settings, answers


def _resume(
    path: Path, settings: AnswerSettings, provenance: Mapping[str, Any], prompts: Mapping[int, tuple[int, ...]]
) -> set[int]:
    """Begin the file, or see to it that it can be gone on with; return the indices that it holds."""
    if not path.is_file() or b"\n" not in path.read_bytes():
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, "settings": asdict(settings), "provenance": dict(provenance)}
        path.write_text(json.dumps(head) + "\n", encoding="utf-8")
        return set()
    earlier, answers = _read(path)
    if differing := [name for name, value in asdict(settings).items() if getattr(earlier, name) != value]:
        was = ", ".join(f"{name} {getattr(earlier, name)!r}, now {getattr(settings, name)!r}" for name in differing)
        raise DataError(
            f"{path} was begun with another setting of {', '.join(differing)} ({was}); go on with the same ones, or "
            "write into another file"
        )
    for answer in answers:
        if answer.index in prompts:
            _compare(path, answer, prompts[answer.index])
    data = path.read_bytes()
    whole_lines = data.rfind(b"\n") + 1
    if whole_lines < len(data):  # a run was killed while it wrote
        with path.open("r+b") as file:
            file.truncate(whole_lines)
    return {answer.index for answer in answers}


def _compare(path: Path, answer: _Answer, prompt: Sequence[int]) -> None:
    if answer.prompt != _print(prompt):
        raise DataError(
            f"{path} answers another prompt in row {answer.index} than the data hold there; give the data set, and the "
            "tokenizer, that it was written with, or distill anew"
        )


def _print(ids: Sequence[int]) -> str:
    return sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


def _short(found: str | None) -> str:
    return found[:12] if found else "none"
