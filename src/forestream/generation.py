"""The user's object: text in, text out, and how it came about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal
from warnings import warn

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from forestream import checkpoint, hub
from forestream.baseline import plain, plain_batch
from forestream.bases import usual_dtype
from forestream.config import Compile, DecodeSettings, Quantise, SamplingSettings, one_of
from forestream.data import prompt_ids
from forestream.decode import decode, decode_batch
from forestream.errors import AcceptanceWarning, CheckpointError, ConfigError, PromptError
from forestream.grammar import CompiledGrammar, Grammar
from forestream.memory import Memory
from forestream.model import StreamingLM
from forestream.requests import Request, each_its_own, several, unpadded, whole_ids
from forestream.schedule import Schedule
from forestream.steps import Counters, Finish, Step, TokenScore, by_text, tokens_of
from forestream.tasks.base import Message
from forestream.writing import Piece, Writing

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a chat, which the base's own chat template puts into place."""

_WARM_PROMPT = 24  # tokens
_DRAFTS_ENOUGH = 50  # passes
_NOTHING_ACCEPTED = (
    "not one draft was accepted in {passes} passes, so drafting only cost time. Was the adapter trained on this base, "
    "and on such prompts, template and all? `forestream inspect` shows what is drafted, `forestream bench` what it is "
    "worth."
)


@dataclass(frozen=True)
class Generation:
    """A finished text.

    Attributes:
        text: what was written, without the prompt and without special tokens.
        tokens: its ids, the end-of-text token included if one was written.
        steps: pass by pass.
        counters: sums over the steps.
        lossy: whether a lossy rule was in force, so that the text may differ from plain decoding's.
    """

    text: str
    tokens: tuple[int, ...]
    steps: tuple[Step, ...]
    counters: Counters
    lossy: bool = False

    @property
    def finish(self) -> Finish | None:
        """ "stop" at an end-of-text token, a stop string or a criterion, "length" at the cap; None of no text."""
        return self.steps[-1].finish if self.steps else None

    @property
    def scores(self) -> tuple[TokenScore, ...]:
        """One for each token, if log-probabilities were asked for."""
        return tuple(score for step in self.steps for score in step.scores)


class Generator:
    """A model with its tokenizer and settings.

    A prompt is a text, token ids, or the messages of a chat: `[{"role": "user", "content": "Why is the sky blue?"}]`.
    Whatever is asked of a text is given by name with it:

    - any field of `DecodeSettings`: `max_new_tokens=32`, `nodes=16`;
    - any field of `SamplingSettings`: `temperature=0.7`, `top_p=0.9`, `seed=1`, `repetition_penalty=1.1`;
    - any field of `Request`: `logprobs=5`, `processors=[...]`, `criteria=[...]`, `eos=2`, `row=2`;
    - `stop`, a string or several: the text ends behind the token that completes one of them;
    - `grammar`, a `Grammar` that the text has to follow.

    >>> generator = Generator.from_pretrained("adapters/smollm2-135m-e2e")
    >>> generator.generate("name[Aromi], eatType[coffee shop] ->").text

    Attributes:
        settings: how drafts are made.
        schedule: how they are made by `generate_batch`, by the number of texts under way; None: as `settings` say.
        sampling: the law that tokens are drawn from.
        eos: ids that end a text.
        adapter: the folder that the model was loaded from; None if it was not.
    """

    adapter: Path | None = None

    def __init__(
        self,
        model: StreamingLM,
        tokenizer: PreTrainedTokenizerBase,
        settings: DecodeSettings | None = None,
        sampling: SamplingSettings | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings or DecodeSettings()
        self.sampling = sampling or SamplingSettings()
        self.schedule = schedule
        self.eos = end_tokens(model, tokenizer)
        self._grammars: dict[tuple[Grammar, tuple[int, ...]], CompiledGrammar] = {}

    @classmethod
    def from_pretrained(
        cls,
        adapter: str | Path,
        base: str | None = None,
        dtype: torch.dtype | None = None,
        settings: DecodeSettings | None = None,
        device: str = "cpu",
        compile: Compile = "off",
        quantise: Quantise = "off",
    ) -> Generator:
        """Load an adapter and the base model it was trained on, prepared for decoding.

        Args:
            adapter: a folder that `forestream train` or `save_pretrained` wrote, or "owner/name" on the hub.
            dtype: of weights and activations; by default bfloat16 where the device multiplies it itself, else float32,
                or float16 on a GPU that has only that.
            compile: "layer" makes every pass much cheaper, once the first passes have taken some seconds to compile
                (`warm_up` takes them beforehand); see `StreamingLM.prepare`.
            quantise: "int8" or "int4" holds the weights of the base's linear layers in integers; needs torchao.

        Raises:
            CheckpointError: the folder is missing, incomplete or corrupt, or the base is another one.
            ConfigError: compiling is asked for and there is no compiler, or quantising and it cannot be done here.
        """
        folder = hub.find(adapter)
        dtype = usual_dtype(device) if dtype is None else dtype
        model, tokenizer = checkpoint.load(folder, base, dtype, quantise=quantise, device=device)
        model.prepare(compile)
        generator = cls(model, tokenizer, settings)
        generator.adapter = folder
        return generator

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adapter's own files, as they were loaded, to `folder`: whole, or not at all.

        Raises:
            CheckpointError: `folder` exists and is no adapter folder, or the adapter was not loaded from one.
        """
        checkpoint.copy_adapter(self._folder(), Path(folder))

    def push_to_hub(self, repo_id: str, **how: Any) -> str:
        """Send the adapter's own files, and nothing else, to the hub; return the address of the commit.

        Args:
            repo_id: "owner/name"; made if it is not there.
            how: private, token, revision, commit_message, create_pr, with the hub client's meaning.

        Raises:
            CheckpointError: the adapter was not loaded from a folder, or the folder is incomplete.
        """
        return hub.push(self._folder(), repo_id, **how)

    def _folder(self) -> Path:
        if self.adapter is None:
            raise CheckpointError(
                "this generator was not loaded from an adapter folder; `checkpoint.save` writes a model's adapter, as "
                "long as it is not merged"
            )
        return self.adapter

    @property
    def host(self) -> PreTrainedModel:
        """The base model with the adapter in it, as the host library knows it."""
        return self.model.port.model

    def warm_up(self) -> None:
        """Meet every kind of pass once, so that none has to be compiled while somebody waits for text."""
        some = [self.eos[0] if self.eos else 0] * _WARM_PROMPT
        new = replace(self.settings, max_new_tokens=2 * self.model.stream_config.streams + 4)
        for steps in (plain(self.model, some, new), decode(self.model, some, new)):
            self.collect(steps)

    def request(self, prompt: Prompt, **asked: Any) -> Request:
        """What is asked for, in full: `asked` are fields of `SamplingSettings` and of `Request`, `stop` and `grammar`.

        Raises:
            PromptError: the prompt is empty.
            ConfigError: a name is unknown, or a value is out of range.
        """
        request, settings = self._asked(prompt, asked)
        if replace(settings, max_new_tokens=self.settings.max_new_tokens) != self.settings:
            raise ConfigError("a request holds no settings of draft trees; give them to the call that decodes it")
        return replace(request, max_new_tokens=asked.get("max_new_tokens"))

    def steps(self, prompt: Prompt | Request, memory: Memory | None = None, **asked: Any) -> Iterator[Step]:
        """Decode speculatively, pass by pass. Errors surface when the first step is asked for."""
        request, settings = self._asked(prompt, asked)
        yield from decode(self.model, request, settings, memory=memory)

    def plain_steps(self, prompt: Prompt | Request, memory: Memory | None = None, **asked: Any) -> Iterator[Step]:
        """The same text by plain decoding, one token a pass."""
        request, settings = self._asked(prompt, asked)
        yield from plain(self.model, request, settings, memory=memory)

    def generate(self, prompt: Prompt | Request, memory: Memory | None = None, **asked: Any) -> Generation:
        """Write after `prompt` until the text ends or the cap is reached.

        Args:
            memory: `Memory(generator.model)`, kept from call to call: what a prompt shares with the text before it, as
                the turns of a chat do, is not read again.

        Raises:
            PromptError: the prompt is empty or leaves no room before the context limit.
            ConfigError: a name in `asked` is unknown, or a value is out of range.
        """
        request, settings = self._asked(prompt, asked)
        return self.collect(decode(self.model, request, settings, memory=memory), request.sampling.lossy)

    def generate_batch(
        self,
        prompts: Sequence[Prompt | Request] | Mapping[str, Any],
        method: Literal["forestream", "plain"] = "forestream",
        **asked: Any,
    ) -> list[Generation]:
        """Write after several prompts together; each text is what `generate` writes with `row` set to its number.

        A prompt that is given several times is read once, and with a temperature each time gives another text. `row`
        is the number of the first text. Processors and criteria are copied for every text but the first one, so that
        whoever keeps a state keeps one for each; what cannot be copied is shared.

        Args:
            prompts: texts, token ids, requests; or what a tokenizer makes of several texts, padded on either side.

        Raises:
            PromptError: a prompt is empty or leaves no room before the context limit, or has padding inside.
            ConfigError: a name in `asked` is unknown, or a value is out of range.
        """
        one_of("method", method, ("forestream", "plain"))
        if isinstance(prompts, str):
            raise PromptError("found one text; a batch takes several, in a list")
        if isinstance(prompts, Mapping):
            prompts = unpadded(*_inputs_of(prompts))
        first, requests, settings = asked.get("row", 0), [], self.settings
        for row, prompt in enumerate(prompts):
            own = asked if isinstance(prompt, Request) else asked | {"row": first + row}
            request, settings = self._asked(prompt, own)
            requests.append(request)
        requests = each_its_own(requests)
        run = (
            plain_batch(self.model, requests, settings)
            if method == "plain"
            else decode_batch(self.model, requests, self._schedule(settings, asked))
        )
        lossy = [one.sampling.lossy and method != "plain" for one in requests]
        return [self.collect(iter(own), rule) for own, rule in zip(by_text(run, len(requests)), lossy, strict=True)]

    def collect(self, steps: Iterator[Step], lossy: bool = False) -> Generation:
        """Run `steps` to the end."""
        done = tuple(steps)
        counters = Counters.of(done)
        tokens = tokens_of(done)
        if counters.drafting >= _DRAFTS_ENOUGH and not counters.accepted:
            warn(AcceptanceWarning(_NOTHING_ACCEPTED.format(passes=counters.drafting)), stacklevel=2)
        return Generation(self.text(tokens), tokens, done, counters, lossy)

    def stream(self, prompt: Prompt | Request, **asked: Any) -> Iterator[str]:
        """Yield the text in pieces as passes deliver it; joined, they are the whole text.

        A character whose bytes are spread over several tokens is held back until it is complete. Closing the iterator
        stops at once.
        """
        writing = Writing(self.text)
        for step in self.steps(prompt, **asked):
            if text := "".join(piece.text for piece in writing.add(step)):
                yield text

    def pieces(self, prompt: Prompt | Request, **asked: Any) -> Iterator[Piece]:
        """As `stream`, but one piece for each token, with its id; a piece is empty while a character is incomplete."""
        writing = Writing(self.text)
        for step in self.steps(prompt, **asked):
            yield from writing.add(step)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without special tokens."""
        decoded = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(decoded, str)
        return decoded

    def _asked(self, prompt: Prompt | Request, asked: dict[str, Any]) -> tuple[Request, DecodeSettings]:
        """The request and the settings that a call asks for."""
        unknown = set(asked) - _TREES - _LAW - _REQUEST - _HERE
        if unknown:
            known = ", ".join(sorted(_TREES | _LAW | _REQUEST | _HERE))
            raise ConfigError(f"unknown: {', '.join(sorted(unknown))}; what can be asked for is {known}")
        asked = {name: value.item() if isinstance(value, np.generic) else value for name, value in asked.items()}
        settings = replace(self.settings, **{name: asked[name] for name in asked if name in _TREES})
        if isinstance(prompt, Request):
            if other := sorted(set(asked) - _TREES):
                raise ConfigError(f"{', '.join(other)} beside a request; the request itself says what is asked for")
            return (replace(prompt, max_new_tokens=None) if "max_new_tokens" in asked else prompt), settings
        sampling = replace(self.sampling, **{name: asked[name] for name in asked if name in _LAW})
        given = {name: asked[name] for name in asked if name in _REQUEST}
        for name in ("processors", "criteria", "eos"):
            if name in given:
                given[name] = several(given[name])
        given["criteria"] = (*given.get("criteria", ()), *self._stops(asked.get("stop")))
        if (grammar := asked.get("grammar")) is not None:
            if not isinstance(grammar, Grammar):
                raise ConfigError(f"grammar is {grammar!r}; expected a Grammar")
            started = self._fitted(grammar, given.get("eos", self.eos)).start()
            given["processors"] = (*given.get("processors", ()), started)
        return Request(**{"prompt": self._ids(prompt), "eos": self.eos, "sampling": sampling, **given}), settings

    def _stops(self, stop: Any) -> tuple[StopStringCriteria, ...]:
        strings = several(stop)
        if not all(isinstance(one, str) and one for one in strings):
            raise ConfigError(f"stop is {stop!r}; expected strings, none of them empty")
        try:
            return (StopStringCriteria(self.tokenizer, list(strings)),) if strings else ()
        except ValueError as error:
            raise ConfigError(f"stop is {stop!r}, which cannot be watched for: {error}") from error

    def _fitted(self, grammar: Grammar, eos: tuple[int, ...]) -> CompiledGrammar:
        """The grammar for this model's vocabulary and these ends, read once."""
        if (grammar, eos) not in self._grammars:
            some = next((one for (_, ends), one in self._grammars.items() if ends == eos), None)
            vocabulary = self.model.port.model.config.vocab_size
            self._grammars[grammar, eos] = (
                some.with_grammar(grammar) if some else grammar.compile(self.tokenizer, eos, vocabulary)
            )
        return self._grammars[grammar, eos]

    def _schedule(self, settings: DecodeSettings, asked: Mapping[str, Any]) -> DecodeSettings | Schedule:
        """The schedule, unless a call asks for trees of its own; what is no matter of trees is never the schedule's."""
        if self.schedule is None or (set(asked) & _TREES) - _NO_TREES:
            return settings
        kept = {name: getattr(settings, name) for name in _NO_TREES}
        return Schedule(tuple((rows, replace(one, **kept)) for rows, one in self.schedule.steps))

    def _ids(self, prompt: Any) -> tuple[int, ...]:
        """Token ids of one prompt: a text, a chat, ids in any usual form, or what a tokenizer makes of one text."""
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty; give some text to go on from")
            return tuple(prompt_ids(self.tokenizer, prompt))
        if isinstance(prompt, Mapping):
            rows = unpadded(*_inputs_of(prompt))
            if len(rows) != 1:
                raise PromptError(f"found {len(rows)} texts; generate takes one, generate_batch several")
            return rows[0]
        if isinstance(prompt, list | tuple) and prompt and all(isinstance(one, Mapping) for one in prompt):
            return prompt_ids(self.tokenizer, prompt)
        return whole_ids(prompt)


_TREES = {field.name for field in fields(DecodeSettings)}
_LAW = {field.name for field in fields(SamplingSettings)}
_REQUEST = {field.name for field in fields(Request)} - {"prompt", "sampling", "max_new_tokens"}
_HERE = {"stop", "grammar"}
_NO_TREES = {"max_new_tokens", "prompt_chunk"}


def _inputs_of(inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    if "input_ids" not in inputs:
        raise PromptError(
            f"found {', '.join(map(repr, inputs)) or 'nothing'}; expected input_ids, as a tokenizer makes them"
        )
    return inputs["input_ids"], inputs.get("attention_mask")


def end_tokens(model: StreamingLM, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a text, by the host's generation settings and by the tokenizer."""
    host = model.port.model.generation_config
    configured = host.eos_token_id if host is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int)}))
