"""Grammars and draft trees: legal nodes against stepwise decoding, and drafts that leave nothing behind."""

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forestream.drafting import DraftTree
from forestream.errors import GrammarError
from forestream.grammar import Grammar, GrammarProcessor
from forestream.sampling import greedy
from forestream.topology import Topology, chain
from forestream.verify import verify
from grammars import (
    EOS,
    GRAMMARS,
    OTHER_EOS,
    PROMPT,
    V,
    allowed,
    byte_level,
    compiled,
    ids,
    masked,
    sample,
)


def random_tree(processor: GrammarProcessor, text: list[int], rng: random.Random, nodes: int) -> DraftTree:
    """Behind each node mostly tokens that are legal there, and some that are not; siblings differ."""
    parents, tokens, paths = [-1], [text[-1]], [list[int]()]
    while len(parents) < nodes:
        parent = rng.randrange(len(parents))
        taken = {tokens[node] for node, above in enumerate(parents) if above == parent}
        try:
            good = sorted(allowed(copy.deepcopy(processor), [*text, *paths[parent]]) - taken)
        except GrammarError:
            good = []
        token = rng.choice(good) if good and rng.random() < 0.8 else rng.randrange(V)
        if token not in taken:
            parents.append(parent)
            tokens.append(token)
            paths.append([*paths[parent], token])
    return DraftTree(Topology(tuple(parents)), tuple(tokens))


def by_hand(processor: GrammarProcessor, text: list[int], tree: DraftTree) -> tuple[int, ...]:
    """Nodes whose whole path the processor would have let through, token by token."""
    legal = {0}
    for node in range(1, len(tree.topology)):
        *above, last = tree.topology.path(node)
        if above[-1] in legal:
            path = [tree.tokens[ancestor] for ancestor in above[1:]]
            if tree.tokens[last] in allowed(copy.deepcopy(processor), [*text, *path]):
                legal.add(node)
    return tuple(sorted(legal))


@pytest.mark.parametrize("form", GRAMMARS)
@pytest.mark.parametrize("seed", range(8))
def test_legal_nodes_are_those_of_stepwise_decoding(form: str, seed: int) -> None:
    """F10: at random places of random texts, `legal` is what the processor says path by path, and changes nothing."""
    rng = random.Random(seed)
    grammar = compiled(GRAMMARS[form])
    written = sample(grammar.start(), PROMPT, seed)
    for length in sorted({0, len(written), *(rng.randrange(len(written) + 1) for _ in range(3))}):
        processor = grammar.start()
        masked(processor, PROMPT)
        text = [*PROMPT, *written[:length]]
        tree = random_tree(processor, text, rng, nodes=14)
        legal = processor.legal(text, tree)
        assert legal == by_hand(processor, text, tree)
        assert processor.legal(text, tree) == legal
        untouched = grammar.start()
        masked(untouched, PROMPT)
        assert torch.equal(masked(processor, text), masked(untouched, text))
        tree.subset(legal)  # whole paths from the root, parents first


def test_rejected_drafts_leave_the_state_as_it_was() -> None:
    """F11: after a tree of which nothing is accepted, the next mask is that of the text without drafts."""
    grammar = compiled(GRAMMARS["regex"])
    processor, plain = grammar.start(), grammar.start()
    masked(processor, PROMPT), masked(plain, PROMPT)
    text = [*PROMPT, *ids("20")]
    drafts = [ids("24")[0], *ids("24-12東")[1:], EOS]
    tree = DraftTree(chain(len(drafts) + 1), (text[-1], *drafts))
    assert len(processor.legal(text, tree)) == len(drafts) + 1
    assert torch.equal(masked(processor, text), masked(plain, text))
    other = [*text, *ids("11-")]
    assert torch.equal(masked(processor, other), masked(plain, other))


def test_before_the_first_call_the_text_is_the_prompt() -> None:
    """A tree behind a prompt may be asked about first; where the prompt ends is still told by the first call."""
    processor = compiled(GRAMMARS["regex"]).start()
    good, bad = ids("2")[0], ids("(")[0]
    tree = DraftTree(Topology((-1, 0, 0, 2)), (PROMPT[-1], good, bad, good))
    for _ in range(2):
        assert processor.legal(PROMPT, tree) == (0, 1)
    assert allowed(processor, PROMPT[:2]) == allowed(compiled(GRAMMARS["regex"]).start(), PROMPT)


def test_behind_the_end_only_the_end_is_legal() -> None:
    processor = compiled(Grammar.regex("a*")).start()
    masked(processor, PROMPT)
    a = ids("a")[0]
    tree = DraftTree(Topology((-1, 0, 1, 2, 2, 0)), (PROMPT[-1], a, EOS, a, OTHER_EOS, EOS))
    assert processor.legal(PROMPT, tree) == (0, 1, 2, 4, 5)


def test_drafts_outside_the_tokenizer_are_illegal_and_harmless() -> None:
    processor = compiled(Grammar.regex("a*")).start()
    masked(processor, PROMPT)
    a = ids("a")[0]
    tree = DraftTree(Topology((-1, 0, 0, 0, 0)), (PROMPT[-1], V - 1, V + 1000, -1, a))
    assert processor.legal(PROMPT, tree) == (0, 4)


def test_a_deep_tree_needs_no_deep_stack() -> None:
    processor = compiled(Grammar.regex("a*")).start()
    masked(processor, PROMPT)
    tree = DraftTree(chain(3000), (PROMPT[-1], *ids("a") * 2999))
    assert processor.legal(PROMPT, tree) == tuple(range(3000))


def test_a_matcher_that_gave_up_is_replaced() -> None:
    """F11: drafts beyond the library's limits put its matcher into an error state for good; the text goes on."""
    grammar = compiled(GRAMMARS["regex"])
    processor = grammar.start()
    masked(processor, PROMPT)
    text = [*PROMPT, *ids("19")]
    tree = DraftTree(Topology((-1, 0, 0, 1)), (text[-1], ids("7")[0], ids("(")[0], ids("7")[0]))
    expected = allowed(processor, text)
    matcher = processor._place._matcher
    matcher.consume_token(ids("(")[0])
    assert matcher.is_error()
    assert allowed(processor, text) == expected
    assert processor._place._matcher is not matcher
    assert processor.legal(text, tree) == (0, 1, 3)


def test_a_dead_end_in_one_branch_is_none_in_another() -> None:
    """F10: behind b this tokenizer cannot write what must follow, and the other branch is looked at all the same."""
    tokenizer = byte_level(["a", "b"], [])
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    processor = Grammar.regex("(bc|aa)a?").compile(tokenizer, [EOS], 9).start()
    processor(torch.tensor([PROMPT]), torch.zeros(1, 9))
    for order in ((a, b), (b, a)):
        tree = DraftTree(Topology((-1, 0, 0, 1, 2)), (PROMPT[-1], *order, a, a))
        assert processor.legal(PROMPT, tree) == (0, 1, 2, 3 + order.index(a))
    assert processor(torch.tensor([PROMPT]), torch.zeros(1, 9)).isfinite().sum() == 2


@pytest.mark.parametrize("form", GRAMMARS)
@pytest.mark.parametrize("seed", range(6))
def test_drafting_writes_the_text_of_stepwise_decoding(form: str, seed: int) -> None:
    """F10: a loop that drops illegal drafts, verifies the rest and commits a path writes what plain decoding writes."""
    grammar, table = compiled(GRAMMARS[form]), torch.randn(997, V, generator=torch.Generator().manual_seed(seed))

    def logits(history: Sequence[int]) -> Tensor:
        return table[hash(tuple(history[-6:])) % 997][None]

    plain, processor = grammar.start(), grammar.start()
    wanted = [*PROMPT]
    while wanted[-1] != EOS and len(wanted) < 60:
        wanted.append(greedy(masked(plain, wanted, logits(wanted)))[0])

    rng = random.Random(seed)
    text = [*PROMPT, greedy(masked(processor, PROMPT, logits(PROMPT)))[0]]
    accepted = 0
    while len(text) < len(wanted):
        # Drafts: the right continuation, cut off at random, among others that are legal or not.
        right = wanted[len(text) : len(text) + rng.randrange(4)]
        tokens = [text[-1], *right, *rng.sample([token for token in range(V) if token not in right], 6)]
        parents = [*range(-1, len(right)), *(rng.randrange(len(right) + 1) for _ in range(6))]
        tree = DraftTree(Topology(tuple(parents)), tuple(tokens))
        kept = processor.legal(text, tree)
        assert set(range(len(right) + 1)) <= set(kept)
        tree, choices = tree.subset(kept), []
        for node in range(len(kept)):
            path = [tree.tokens[ancestor] for ancestor in tree.topology.path(node)[1:]]
            choices.append(greedy(masked(processor, [*text, *path], logits([*text, *path])))[0])
        verdict = verify(tree, choices.__getitem__)
        text += [*(tree.tokens[node] for node in verdict.path[1:]), verdict.next_token]
        accepted += len(verdict.path) - 1
    assert text[: len(wanted)] == wanted
    assert accepted
