"""Examples to batches: every target by hand, what is never a target, carriers, and the order of training."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from forestream.data import (
    Collator,
    TokenDataset,
    Tokens,
    grouped_order,
    nothing,
    prompt_ids,
    prompts_of,
    template_of,
    template_print,
    tokenize,
)
from forestream.errors import DataError, PromptError
from forestream.objective import IGNORED
from forestream.tasks.base import Example

X = IGNORED
EOS = 9
ONE = Tokens((10, 11, 12), (20, 21, 22, EOS))


def tokenizer(begin: bool = False, **special: str) -> PreTrainedTokenizerFast:
    """One id per word: <end> 0, <begin> 1, then a to h."""
    words = {word: number for number, word in enumerate(("<end>", "<begin>", "<unk>", *"abcdefgh"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begin:
        inner.post_processor = processors.TemplateProcessing("<begin> $A", special_tokens=[("<begin>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **special)


# --- tokens ---------------------------------------------------------------------------------------------------


def test_the_completion_ends_with_the_end_of_text() -> None:
    found = tokenize(tokenizer(eos_token="<end>"), Example("a b", " c d", ("c d",)))
    assert found == Tokens((3, 4), (5, 6, 0))
    assert len(found) == 5


def test_a_prompt_begins_with_the_begin_of_text_where_there_is_one_and_a_completion_never() -> None:
    found = tokenize(tokenizer(begin=True, eos_token="<end>"), Example("a b", " c", ("c",)))
    assert found == Tokens((1, 3, 4), (5, 0))
    assert prompt_ids(tokenizer(begin=True), "a b") == (1, 3, 4)


def test_without_an_end_of_text_there_is_no_training() -> None:
    with pytest.raises(DataError, match="no end-of-text token"):
        tokenize(tokenizer(), Example("a b", " c d", ("c d",)))


def test_a_prompt_without_tokens_is_refused() -> None:
    silent = tokenizer(eos_token="<end>")
    silent.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    with pytest.raises(DataError, match="empty prompt; its completion begins ' c d'"):
        tokenize(silent, Example("a", " c d", ("c d",)))


# --- chats ------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)
HELLO = Example("b c", "d", ("d",), form="chat")


def chatting(template: str | dict[str, str] | None = TEMPLATE) -> PreTrainedTokenizerFast:
    found = tokenizer(begin=True, eos_token="<end>")
    found.chat_template = template
    return found


def test_a_chat_is_rendered_by_the_template_as_far_as_the_answer() -> None:
    """`u` is no word here; the template decides, so no begin-of-text token comes by itself."""
    assert prompt_ids(chatting(), HELLO.asked) == (2, 4, 5, 3)
    turns = [*HELLO.asked, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]
    assert prompt_ids(chatting(), turns) == (2, 4, 5, 3, 6, 2, 7, 3)
    assert tokenize(chatting(), HELLO) == Tokens((2, 4, 5, 3), (6, 0))


def test_prompts_of_examples_are_what_each_of_them_asks() -> None:
    asked = chatting()
    text = Example("b c", " d", ("d",))
    assert prompts_of(asked, [text, HELLO]) == [prompt_ids(asked, "b c"), prompt_ids(asked, HELLO.asked)]
    assert len(set(prompts_of(asked, [text, HELLO]))) == 2


def test_without_a_template_there_are_no_chats() -> None:
    assert template_print(chatting(None)) is None
    with pytest.raises(PromptError, match="a tokenizer without a chat template; give a base model"):
        prompt_ids(chatting(None), HELLO.asked)


def test_a_template_that_refuses_is_an_error_that_says_so() -> None:
    strict = chatting("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="does not take these messages: roles must alternate"):
        prompt_ids(strict, HELLO.asked)


def test_an_answer_that_is_wanted_cannot_be_learned() -> None:
    with pytest.raises(DataError, match=r"has no answer to learn .*'b c'.*forestream distill"):
        tokenize(chatting(), Example("b c", "", (), form="chat"))


def test_templates_are_told_apart() -> None:
    prints = [template_print(chatting(t)) for t in (TEMPLATE, TEMPLATE + " ", {"default": TEMPLATE, "tools": "x"})]
    assert all(found is not None and len(found) == 64 for found in prints)
    assert len(set(prints)) == 3
    assert template_print(chatting()) == prints[0]


def test_only_chats_depend_on_the_template() -> None:
    text = Example("a", " b", ("b",))
    assert template_of(chatting(), [text]) is None
    assert template_of(chatting(), [text, HELLO]) == template_print(chatting())


# --- targets --------------------------------------------------------------------------------------------------


def test_every_target_of_one_example_by_hand() -> None:
    batch = Collator(streams=3, pad=0).batch([ONE])
    assert batch.ids.tolist() == [[10, 11, 12, 20, 21, 22]]
    # The main stream: from the prompt's last token to the one before the end.
    assert batch.rows.tolist() == [[2, 3, 4, 5]]
    assert batch.targets.tolist() == [[20, 21, 22, EOS]]
    # Carriers have a target for stream 1; stream j at t predicts the token at t + 1 + j.
    assert batch.carriers.tolist() == [[2, 3, 4]]
    assert batch.stream_targets.tolist() == [[[21, 22, EOS], [22, EOS, X], [EOS, X, X]]]


def test_shorter_examples_are_padded_with_places_that_ask_for_nothing() -> None:
    short = Tokens((13,), (23, EOS))
    batch = Collator(streams=2, pad=7).batch([ONE, short])
    assert batch.ids.tolist() == [[10, 11, 12, 20, 21, 22], [13, 23, 7, 7, 7, 7]]
    assert batch.rows.tolist() == [[2, 3, 4, 5], [0, 1, 0, 0]]
    assert batch.targets.tolist() == [[20, 21, 22, EOS], [23, EOS, X, X]]
    assert batch.carriers.tolist() == [[2, 3, 4], [0, 0, 0]]
    assert batch.stream_targets.tolist() == [[[21, 22, EOS], [22, EOS, X]], [[EOS, X, X], [X, X, X]]]


def test_the_end_is_a_target_even_where_it_is_also_the_padding() -> None:
    """Pad = end of text must not teach the model never to stop."""
    same, other = (Collator(2, pad).batch([ONE, Tokens((13,), (23, EOS))]) for pad in (EOS, 0))
    for name in ("rows", "targets", "carriers", "stream_targets"):
        assert torch.equal(getattr(same, name), getattr(other, name))
    assert (same.targets == EOS).sum() == 2
    assert (same.stream_targets[:, 0] == EOS).sum() == 2


def test_no_token_of_a_prompt_is_ever_a_target() -> None:
    examples = [Tokens(tuple(range(100, 100 + n)), (*range(1, m), EOS)) for n in (1, 4, 7) for m in (1, 2, 6)]
    batch = Collator(streams=4, pad=0).batch(examples)
    for targets in (batch.targets, batch.stream_targets):
        assert (targets < 100).all()
    for row, example in enumerate(examples):
        assert batch.targets[row][batch.targets[row] != X].tolist() == list(example.completion)


def test_tokens_of_prompts_are_targets_where_they_are_asked_for() -> None:
    batch = Collator(streams=2, pad=7, targets="all").batch([ONE, Tokens((13,), (23, EOS))])
    # Every token but the first is some position's next one, whatever part of the text it is in.
    assert batch.rows.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [[11, 12, 20, 21, 22, EOS], [23, EOS, X, X, X, X]]
    assert batch.carriers.tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    assert batch.stream_targets[0].tolist() == [[12, 20, 21, 22, EOS], [20, 21, 22, EOS, X]]
    assert batch.stream_targets[1].tolist() == [[EOS, X, X, X, X], [X, X, X, X, X]]
    assert batch.ids.tolist() == Collator(streams=2, pad=7).batch([ONE, Tokens((13,), (23, EOS))]).ids.tolist()


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_every_stream_has_the_targets_that_are_left_for_it(streams: int) -> None:
    """Stream j loses the first j tokens of the completion: what it has left is what stands behind them."""
    batch = Collator(streams, pad=0).batch([ONE])
    for j in range(1, streams + 1):
        targets = batch.stream_targets[0, j - 1]
        assert targets[targets != X].tolist() == list(ONE.completion[j:])
        held = [t for t, target in zip(batch.carriers[0].tolist(), targets.tolist(), strict=True) if target != X]
        whole = (*ONE.prompt, *ONE.completion)
        assert [whole[t + 1 + j] for t in held] == list(ONE.completion[j:])


def test_a_completion_of_the_end_alone_asks_nothing_of_its_streams() -> None:
    batch = Collator(streams=2, pad=0).batch([Tokens((10, 11), (EOS,))])
    assert batch.ids.tolist() == [[10, 11]]
    assert (batch.rows.tolist(), batch.targets.tolist()) == ([[1]], [[EOS]])
    # A place that asks for nothing: every batch reaches every weight.
    assert batch.carriers.tolist() == [[0]]
    assert batch.stream_targets.tolist() == [[[X], [X]]]


def test_an_example_that_fills_up_a_batch_asks_for_nothing() -> None:
    batch = Collator(streams=2, pad=7).batch([ONE, nothing(7)])
    assert batch.ids[1].tolist() == [7] * 6
    assert (batch.targets[1] == X).all()
    assert (batch.stream_targets[1] == X).all()
    assert torch.equal(batch.targets[:1], Collator(streams=2, pad=7).batch([ONE]).targets)


def test_without_streams_there_are_no_carriers_and_the_rest_is_the_same() -> None:
    plain, rich = Collator(0, pad=0).batch([ONE]), Collator(3, pad=0).batch([ONE])
    assert plain.carriers.shape == (1, 0)
    assert plain.stream_targets.shape[1] == 0
    for name in ("ids", "rows", "targets"):
        assert torch.equal(getattr(plain, name), getattr(rich, name))


def test_the_collator_hands_out_the_fields_by_name() -> None:
    collate = Collator(2, pad=0)
    batch = collate([ONE])
    assert set(batch) == {"ids", "rows", "targets", "carriers", "stream_targets"}
    assert all(tensor.dtype == torch.long for tensor in batch.values())
    assert torch.equal(batch["stream_targets"], collate.batch([ONE]).stream_targets)


# --- a share of the carriers ----------------------------------------------------------------------------------

LONG = [Tokens((5, i), (*range(30, 90), EOS)) for i in range(12)]


def carriers_of(collate: Collator, example: Tokens) -> list[int]:
    return collate.batch([example]).carriers[0].tolist()


def test_a_share_of_the_carriers_is_fixed_for_a_text_and_differs_between_texts() -> None:
    collate = Collator(2, pad=0, share=0.5)
    alone = [carriers_of(collate, example) for example in LONG]
    batch = collate.batch(LONG)
    for row, chosen in enumerate(alone):
        assert batch.carriers[row, : len(chosen)].tolist() == chosen
        whole = (*LONG[row].prompt, *LONG[row].completion)
        assert batch.stream_targets[row, 0, : len(chosen)].tolist() == [whole[t + 2] for t in chosen]
        assert (batch.stream_targets[row, :, len(chosen) :] == X).all()
    assert len({tuple(chosen) for chosen in alone}) == len(LONG)
    assert 0.4 < sum(map(len, alone)) / (60 * len(LONG)) < 0.6


def test_the_share_thins_streams_and_leaves_the_main_stream_alone() -> None:
    for share, possible in ((1.0, 60), (0.0, 0)):
        collate = Collator(2, pad=0, share=share)
        assert int((collate.batch([LONG[0]]).stream_targets[0, 0] != X).sum()) == possible
        assert torch.equal(collate.batch(LONG).targets, Collator(2, pad=0).batch(LONG).targets)


def test_another_seed_chooses_other_carriers() -> None:
    chosen = [carriers_of(Collator(2, pad=0, share=0.5, seed=seed), LONG[0]) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


# --- the order of training ------------------------------------------------------------------------------------

LENGTHS = [int(n) for n in torch.randint(1, 200, (137,), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(("count", "size"), [(137, 8), (7, 8), (8, 8), (9, 8), (1, 1), (450, 4)])
def test_every_epoch_meets_every_example_once(count: int, size: int) -> None:
    order = grouped_order([n % 17 for n in range(count)], size, epochs=3, seed=5)
    assert sorted(order) == sorted(3 * list(range(count)))
    whole = count // size * size
    for epoch in range(3):
        assert len(set(order[epoch * whole : (epoch + 1) * whole])) == whole


def test_the_order_depends_on_lengths_and_seed_alone() -> None:
    first = grouped_order(LENGTHS, 8, epochs=2, seed=1)
    torch.manual_seed(99)
    assert grouped_order(LENGTHS, 8, epochs=2, seed=1) == first
    assert grouped_order(LENGTHS, 8, epochs=2, seed=2) != first
    assert first[:137] != first[137:]


def test_more_epochs_leave_the_first_ones_as_they_were() -> None:
    # The one example that fills no batch is met at the very end.
    assert grouped_order(LENGTHS, 8, epochs=3, seed=1)[:136] == grouped_order(LENGTHS, 8, epochs=1, seed=1)[:136]


def test_batches_hold_similar_lengths_and_come_in_random_order() -> None:
    order = grouped_order(LENGTHS, 8, epochs=2, seed=1)
    batches = [[LENGTHS[i] for i in order[at : at + 8]] for at in range(0, 2 * 136, 8)]
    spread = max(max(batch) - min(batch) for batch in batches)
    # 137 lengths from 1 to 200 in 17 batches: about 12 apart if sorted, about 160 if not.
    assert spread < 40
    middles = [sum(batch) for batch in batches]
    rises = Counter(a < b for a, b in pairwise(middles))
    assert min(rises[True], rises[False]) >= 3


def test_the_short_batch_comes_last_so_that_it_shifts_no_other() -> None:
    lengths = [1] * 8 + [100] * 8 + [50] * 3
    order = grouped_order(lengths, 8, epochs=1, seed=0)
    assert len(order) == 19
    for at in (0, 8):
        assert max(lengths[i] for i in order[at : at + 8]) - min(lengths[i] for i in order[at : at + 8]) <= 50


def test_a_dataset_is_the_examples_in_that_order() -> None:
    order = grouped_order([len(e) for e in LONG], 4, epochs=2, seed=3)
    data = TokenDataset(LONG, order)
    assert len(data) == 24
    assert [data[place] for place in range(24)] == [LONG[i] for i in order]
