"""The counters on a scripted run, and the same numbers recomputed from the log by other means."""

from collections.abc import Sequence

import pytest

from forestream.drafting import DraftTree
from forestream.steps import Counters, Step, acceptance_by_place, tokens_of
from forestream.topology import Topology, chain

THREE = DraftTree(chain(4), (0, 1, 2, 3))
BUSH = DraftTree(Topology((-1, 0, 0, 1)), (0, 1, 2, 3))
ROOT = DraftTree(chain(1), (0,))

# A prompt pass, then: 3 of 3 drafts accepted, none of 3, 1 of a bush of depth 2, nothing drafted.
RUN = [
    Step((10,), 0, 8.0),
    Step((11, 12, 13, 14), 3, 1.0, THREE, (0, 1, 2, 3), (0, 1, 2, 3)),
    Step((15,), 0, 1.0, THREE, (0, 1, 2, 3), (0,)),
    Step((16, 17), 1, 1.5, BUSH, (0, 1, 2, 3), (0, 2)),
    Step((18,), 0, 0.5, ROOT, (0,), (0,), "length"),
]


def counted(steps: Sequence[Step]) -> Counters:
    counters = Counters()
    counters.extend(steps)
    return counters


def recomputed(steps: Sequence[Step]) -> dict[str, object]:
    """The definitions, written down once more, over the whole log at once."""
    prompt = [step for step in steps if step.tree is None]
    verified = [step for step in steps if step.tree is not None]
    tokens = sum(len(step.tokens) for step in steps)
    accepted = sum(step.accepted for step in verified)
    by_position = []
    given = []
    position = 1
    while offered := [step for step in verified if depth_of(step) >= position]:
        by_position.append(sum(step.accepted >= position for step in offered) / len(offered))
        before = [step for step in offered if step.accepted >= position - 1]
        given.append(sum(step.accepted >= position for step in before) / len(before) if before else 0.0)
        position += 1
    return {
        "generated": tokens,
        "prompts": len(prompt),
        "passes": len(verified),
        "accepted": accepted,
        "nodes": sum(len(step.kept) for step in verified),
        "prompt_seconds": sum(step.seconds for step in prompt),
        "decode_seconds": sum(step.seconds for step in verified),
        "call_reduction": tokens / len(verified),
        "mean_acceptance_length": 1 + accepted / len(verified),
        "acceptance_by_position": by_position,
        "acceptance_given_previous": given,
        "nodes_per_pass": sum(len(step.kept) for step in verified) / len(verified),
        "tokens_per_second": (tokens - len(prompt)) / sum(step.seconds for step in verified),
    }


def depth_of(step: Step) -> int:
    assert step.tree is not None
    return max(len(step.tree.topology.path(node)) - 1 for node in step.kept)


def test_a_scripted_run_by_hand() -> None:
    counters = counted(RUN)
    assert (counters.generated, counters.prompts, counters.passes) == (9, 1, 4)
    assert (counters.accepted, counters.nodes) == (4, 13)
    assert (counters.prompt_seconds, counters.decode_seconds) == (8.0, 4.0)
    assert counters.call_reduction == 9 / 4
    assert counters.mean_acceptance_length == 2.0
    assert counters.acceptance_by_position == [2 / 3, 1 / 3, 1 / 2]
    assert counters.nodes_per_pass == 13 / 4
    assert counters.tokens_per_second == 2.0


def test_the_same_numbers_from_the_log_by_an_independent_function() -> None:
    for steps in (RUN, RUN[:2], RUN + RUN, [RUN[0], *RUN[3:]]):
        counters = counted(steps)
        assert {name: getattr(counters, name) for name in recomputed(steps)} == recomputed(steps)


def test_order_does_not_matter_and_runs_add_up() -> None:
    assert counted([*RUN[::-1]]) == counted(RUN)
    twice = counted(RUN)
    twice.extend(RUN)
    assert twice == counted([*RUN, *RUN])


@pytest.mark.parametrize("cut", range(len(RUN) + 1))
def test_merged_counters_are_those_of_all_steps(cut: int) -> None:
    merged = counted(RUN[:cut])
    merged.merge(counted(RUN[cut:]))
    assert merged == counted(RUN)


def test_acceptance_is_shown_against_what_was_drafted_at_that_depth() -> None:
    """Passes whose tree was too shallow do not count against a position."""
    shallow = Step((5, 6), 1, 1.0, DraftTree(chain(2), (0, 5)), (0, 1), (0, 1))
    deep = Step((5,), 0, 1.0, THREE, (0, 1, 2, 3), (0,))
    assert counted([shallow, deep]).acceptance_by_position == [1 / 2, 0.0, 0.0]


def test_both_shares_by_position_and_how_they_differ() -> None:
    """Of three passes one accepts 2 of 2 drafts, one 1, one none: half of those that got there accepted the second."""
    tree = DraftTree(chain(3), (0, 5, 6))
    runs = [Step(tuple(range(n + 1)), n, 1.0, tree, (0, 1, 2), tuple(range(n + 1))) for n in (2, 1, 0)]
    counters = counted(runs)
    assert counters.acceptance_by_position == [2 / 3, 1 / 3]
    assert counters.acceptance_given_previous == [2 / 3, 1 / 2]
    assert counted(runs[2:]).acceptance_given_previous == [0.0, 0.0]


def test_pruned_nodes_were_not_offered() -> None:
    pruned = Step((5,), 0, 1.0, THREE, (0, 1), (0,))
    assert pruned.offered_depth == 1
    assert counted([pruned]).acceptance_by_position == [0.0]
    assert counted([pruned]).nodes == 2


def test_the_prompt_pass_offers_nothing_and_counts_apart() -> None:
    counters = counted(RUN[:1])
    assert RUN[0].offered_depth == 0
    assert (counters.generated, counters.passes, counters.acceptance_by_position) == (1, 0, [])
    assert (counters.tokens_per_second, counters.nodes_per_pass, counters.mean_acceptance_length) == (0.0, 0.0, 1.0)


def test_a_text_that_ends_inside_the_drafts_has_no_token_of_the_main_stream_behind_them() -> None:
    """The end-of-text token was drafted and accepted: the speed counts the tokens that were delivered."""
    ended = [RUN[0], Step((11, 12), 2, 2.0, THREE, (0, 1, 2, 3), (0, 1, 2), "stop")]
    counters = counted(ended)
    assert counters.generated == 3
    assert counters.mean_acceptance_length == 3.0
    assert counters.tokens_per_second == pytest.approx(1.0)


def test_the_tokens_of_a_run_in_order() -> None:
    assert tokens_of(RUN) == (10, 11, 12, 13, 14, 15, 16, 17, 18)
    assert tokens_of([]) == ()


def test_acceptance_by_place_in_the_text() -> None:
    """D17: places count the prompt; a pass belongs to where it begins."""
    root = DraftTree(Topology((-1, 0)), (1, 2))
    drafted = (1, 0, 1, 1, 0)
    steps = [Step((1,), 0, 0.1), *(Step((2,) * (n + 1), n, 0.1, root, (0, 1), (0, 1)[: n + 1]) for n in drafted)]
    # passes begin behind 4, 6, 7, 9 and 11 tokens
    assert acceptance_by_place(steps, prompt=3, bucket=4) == [1.0, 1 + 2 / 3, 1.5]
    assert acceptance_by_place(steps[:1], prompt=3) == []
