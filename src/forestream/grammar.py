"""Constrained decoding: a grammar says which tokens may come next. Needs the extra `forestream[grammar]`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from forestream.drafting import DraftTree
from forestream.errors import ConfigError, GrammarError, UnsupportedModel

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

_ALLOWED: Final = 200
"""What the library writes into the byte of an allowed token; 0 into the others."""

# Otherwise text without a choice is only allowed in the tokens that the tokenizer makes of it, which is wrong where the
# tokenizer changes or loses characters, and forbids drafts that are perfectly legal.
_OPTIONS: Final = '\n%llguidance {"no_forcing": true}'


@dataclass(frozen=True)
class Grammar:
    """Which texts are legal. A description only: `compile` fits it to a tokenizer.

    Attributes:
        form: the language that `source` is written in.
        source: the schema as JSON text, the regular expression, or the rules.

    Raises:
        ConfigError: the source is malformed, asks for what the library cannot hold, or the library is not installed.
    """

    form: Literal["json_schema", "regex", "lark"]
    source: str

    def __post_init__(self) -> None:
        _require_library()
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(self._serialized())
        if failed:
            raise self._refusal(messages[0])

    @staticmethod
    def json_schema(schema: dict[str, Any] | str) -> Grammar:
        """JSON that satisfies `schema`; properties come in the schema's order.

        White space between JSON's tokens is free; `"x-guidance": {"whitespace_flexible": false}` at the schema's top
        forbids it.
        """
        try:
            # Read and written again: what stood behind the JSON would count as rules.
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            source = json.dumps(parsed, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the schema is no JSON ({error}); expected a JSON schema as text or dict") from error
        return Grammar("json_schema", source)

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Text that matches `pattern` as a whole; look-around and references back are not to be had."""
        return Grammar("regex", pattern)

    @staticmethod
    def lark(rules: str) -> Grammar:
        """Text of the context-free grammar `rules`, in Lark's notation; it begins at the rule `start`."""
        return Grammar("lark", rules)

    def compile(self, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int], vocabulary: int) -> CompiledGrammar:
        """Fit the grammar to a model. Reads the whole tokenizer, which takes a while: do it once a model.

        Args:
            tokenizer: a fast tokenizer whose tokens stand for bytes.
            eos: ids that end the text, allowed where the grammar is complete and nowhere else.
            vocabulary: V, the width of the model's logits; ids that the tokenizer lacks are forbidden.

        Raises:
            ConfigError: `eos` is empty or outside the vocabulary, or the grammar names tokens that are not there.
            UnsupportedModel: the tokenizer's tokens cannot be turned into bytes.
        """
        from llguidance.hf import from_tokenizer

        if not eos or not all(0 <= token < vocabulary for token in eos):
            raise ConfigError(
                f"end-of-text ids are {list(eos)}; expected at least one, from 0 to {vocabulary - 1}: constrained text "
                "ends with one of them"
            )
        try:
            words = from_tokenizer(tokenizer, eos_token=list(eos))
        except ValueError as error:
            raise UnsupportedModel(
                f"{type(tokenizer).__name__} cannot be used with a grammar ({error}); expected a fast tokenizer of "
                "byte level or with byte fallback, and end-of-text ids that it knows"
            ) from error
        return CompiledGrammar(self, words, frozenset(eos), vocabulary)

    def _serialized(self) -> str:
        """The grammar as the library takes it."""
        from llguidance import LLMatcher, regex_to_lark

        match self.form:
            case "json_schema":
                rules = f"start: %json {self.source}"
            case "regex":
                rules = f"start: /{regex_to_lark(self.source or '(?:)', '')}/"
            case "lark":
                rules = self.source
        return LLMatcher.grammar_from_lark(rules + _OPTIONS)

    def _refusal(self, message: str) -> ConfigError:
        names = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
        if self.form != "lark":  # the excerpt behind the message shows rules that the caller did not write
            message = message.partition("\n   1 | ")[0]
        return ConfigError(f"this {names[self.form]} cannot be used: {message.strip()}")


class CompiledGrammar:
    """A grammar fitted to a model: immutable, shared by all texts.

    Attributes:
        grammar: what was compiled.
        words: the tokenizer's tokens as bytes, in the library's form.
        eos: ids that end the text.
        vocabulary: V, the width of the model's logits.

    Raises:
        ConfigError: the grammar names tokens that the tokenizer does not have.
    """

    def __init__(self, grammar: Grammar, words: LLTokenizer, eos: frozenset[int], vocabulary: int) -> None:
        from llguidance import LLMatcher

        self.grammar = grammar
        self.words = words
        self.eos = eos
        self.vocabulary = vocabulary
        # Copies share what the original has worked out, so masks met in one text are quick in the next.
        self._matcher = LLMatcher(words, grammar._serialized(), log_level=0)
        if self._matcher.is_error():
            raise grammar._refusal(self._matcher.get_error())

    def with_grammar(self, grammar: Grammar) -> CompiledGrammar:
        """Another grammar for the same model; the tokenizer is not read again."""
        return CompiledGrammar(grammar, self.words, self.eos, self.vocabulary)

    def start(self) -> GrammarProcessor:
        """A processor for one new text."""
        return GrammarProcessor(self)

    def matcher(self) -> LLMatcher:
        """The library's matcher, at the beginning of a text."""
        return self._matcher.deep_copy()


class Place:
    """How far a text has come in its grammar. Tokens are taken one by one, and dropped again from the end.

    Attributes:
        tokens: what was taken since the beginning, ends of text included.
    """

    def __init__(self, compiled: CompiledGrammar, matcher: LLMatcher) -> None:
        self.tokens: list[int] = []
        self._compiled = compiled
        self._matcher = matcher
        # Ends of text are counted here: the library would take an end id that is also ordinary text for text.
        self._ends = 0

    def take(self, token: int) -> bool:
        """Go on by `token`; where it is forbidden nothing changes and the answer is False."""
        if token in self._compiled.eos:
            fits = self._complete
            self._ends += fits
        else:
            # An id that the tokenizer lacks would put the matcher into its error state.
            known = 0 <= token < min(self._compiled.words.vocab_size, self._compiled.vocabulary)
            fits = known and not self._ends and self._matcher.try_consume_tokens([token]) == 1
        if fits:
            self.tokens.append(token)
        return fits

    def drop(self, count: int) -> None:
        """Go back by the last `count` tokens taken."""
        ends = min(count, self._ends)
        self._ends -= ends
        del self.tokens[len(self.tokens) - count :]
        if self.failure:  # nothing but a new matcher leads out of the library's error state
            self._matcher = self._compiled.matcher()
            self._matcher.try_consume_tokens(self.tokens[: len(self.tokens) - self._ends])
        else:
            self._matcher.rollback(count - ends)

    def allowed(self) -> bytearray:
        """One byte per id of the model, `_ALLOWED` where it may come next. All zero if the grammar is stuck."""
        width = self._compiled.vocabulary
        row = bytearray() if self._ends else bytearray(self._matcher.compute_logit_bias()[:width])
        row.extend(bytes(width - len(row)))
        # A matcher that gives up allows the end of text, whether the grammar is complete or not.
        end = _ALLOWED if self._complete and not self.failure else 0
        for token in self._compiled.eos:
            row[token] = end
        return row

    def copy(self) -> Place:
        """The same place, for another text to go on from."""
        twin = Place(self._compiled, self._matcher.deep_copy())
        twin.tokens, twin._ends = [*self.tokens], self._ends
        return twin

    @property
    def failure(self) -> str:
        """Why the matcher gave up; empty if it has not."""
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else ""

    @property
    def _complete(self) -> bool:
        return self._ends > 0 or self._matcher.is_accepting()


class GrammarProcessor:
    """Forbids what the grammar forbids, for one text; takes the place of a logits processor of the host library.

    The first call tells where the prompt ends. From then on histories are compared with what was seen before, so
    several tokens may come at once, and tokens may be taken back. Deep copies go on by themselves.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._place = Place(compiled, compiled.matcher())
        self._prompt: list[int] | None = None

    def __call__(self, input_ids: Int[Tensor, "1 T"], scores: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        """`scores` of the next token, minus infinity for the ids that may not come next.

        Args:
            input_ids: the prompt in the first call; prompt and text written so far in later ones.
            scores: logits of the next token.

        Raises:
            GrammarError: no token may come next, the text left the grammar, or the prompt is another one.
            ConfigError: more than one text, or logits of another width than was compiled for.
        """
        if input_ids.shape[0] != 1 or scores.shape != (1, self._compiled.vocabulary):
            raise ConfigError(
                f"input_ids are {list(input_ids.shape)} and scores {list(scores.shape)}; expected [1, T] and "
                f"[1, {self._compiled.vocabulary}]: a processor follows one text, of the model it was compiled for"
            )
        history: list[int] = input_ids[0].tolist()
        if self._prompt is None:
            self._prompt = history
        self._follow(history)
        allowed = self._place.allowed()
        if _ALLOWED not in allowed:
            why = f" ({self._place.failure})" if self._place.failure else ""
            raise GrammarError(
                f"after {len(self._place.tokens)} tokens the grammar is incomplete and allows no token that the model "
                f"has{why}; check it for rules that cannot end and for characters that the tokenizer cannot write"
            )
        forbidden = ~torch.frombuffer(allowed, dtype=torch.uint8).bool()
        return scores.masked_fill(forbidden.to(scores.device), -torch.inf)

    def legal(self, text: Sequence[int], tree: DraftTree) -> tuple[int, ...]:
        """Numbers of the nodes that the grammar allows: whole paths from the root, which always stays, increasing.

        Args:
            text: the prompt and what is written so far, up to the root's token.
            tree: drafts behind the last token of `text`.

        Raises:
            GrammarError: the text left the grammar, or the prompt is another one.
        """
        if self._prompt is not None:
            self._follow(text)
        legal, path = [0], [0]
        ahead = [*tree.topology.children[0]]
        try:
            while ahead:
                node = ahead.pop()
                while path[-1] != tree.topology.parents[node]:
                    path.pop()
                    self._place.drop(1)
                if self._place.take(tree.tokens[node]):
                    path.append(node)
                    legal.append(node)
                    ahead += tree.topology.children[node]
        finally:
            self._place.drop(len(path) - 1)
        return tuple(sorted(legal))

    def _follow(self, history: Sequence[int]) -> None:
        """Bring the place to the end of `history`, forwards or backwards."""
        prompt, written = self._prompt or [], self._place.tokens
        if list(history[: len(prompt)]) != prompt:
            raise GrammarError(
                f"the text does not begin with the {len(prompt)} tokens of this processor's prompt; take a new "
                "processor for every text"
            )
        wanted = list(history[len(prompt) :])
        self._place.drop(len(written) - _common(written, wanted))
        for token in wanted[len(written) :]:
            if not self._place.take(token):
                raise GrammarError(
                    f"token {token}, number {len(written) + 1} after the prompt, is none that the grammar allows "
                    "there; choose tokens from the scores that the processor returns"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarProcessor:
        twin = GrammarProcessor(self._compiled)
        twin._place = self._place.copy()
        twin._prompt = self._prompt
        return twin


def _common(one: list[int], other: list[int]) -> int:
    """Length of the beginning that two texts share."""
    if one == other[: len(one)]:
        return len(one)
    return next(place for place, token in enumerate(one) if other[place : place + 1] != [token])


def _require_library() -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise ConfigError(
            "grammars need the package 'llguidance', which is not installed; run: pip install 'forestream[grammar]'"
        )
