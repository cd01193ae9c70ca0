"""One thing made wrong at a time: comparing texts with those of plain decoding must notice each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from forestream import decode as loop
from forestream.cache import StreamCache
from forestream.drafting import DraftTree
from forestream.masks import additive
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.verify import Verdict, verify
from subject import lively, model_of
from zoo import HOSTS

every_host = pytest.mark.parametrize("host", HOSTS)
both_modes = pytest.mark.parametrize("mode", ["joint", "lossless"])


def one_wrong_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's first child, which the prophet makes the likeliest, sees its sibling."""
    right = Pack.visible.func  # type: ignore[attr-defined]

    def wrong(pack: Pack) -> torch.Tensor:
        seen: torch.Tensor = right(pack).clone()
        if pack.mains > 2 and pack.depths[0, 2] == 1:  # plain decoding and prompts have no siblings
            seen[:, 1, 2] = True
        return seen

    monkeypatch.setattr(Pack, "visible", property(wrong))


def positions_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of depth 1 and more stand one place too far."""
    right = Pack.positions

    def wrong(pack: Pack, committed: int, rule: Any) -> torch.Tensor:
        places = right(pack, committed, rule)
        return places + (places > committed) if committed else places

    monkeypatch.setattr(Pack, "positions", wrong)


def commit_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last accepted node's neighbour is committed in its place."""
    right = StreamCache.commit

    def wrong(cache: StreamCache, layers: range, path: Sequence[int], row: int) -> None:
        right(cache, layers, [*path[:-1], path[-1] + 1] if len(path) > 1 else path, row)

    monkeypatch.setattr(StreamCache, "commit", wrong)


def trunk_paths_for_stream_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """After pruning, trunk layers commit the survivors' numbers in place of the nodes' own."""
    right = loop.commit

    def wrong(model: StreamingLM, checked: loop.Checked, *rest: Any) -> None:
        survivors = tuple(tuple(range(len(kept))) for kept in checked.kept)
        right(model, replace(checked, kept=survivors), *rest)

    monkeypatch.setattr(loop, "commit", wrong)


def window_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tree passes see one key more than the window."""

    def wrong(pack: Pack, committed: Sequence[int], positions: Any, window: int | None, *rest: Any) -> torch.Tensor:
        wider = window + 1 if window is not None and pack.mains > 1 and any(committed) else window
        return additive(pack, committed, positions, wider, *rest)

    monkeypatch.setattr("forestream.model.additive", wrong)


def accepts_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first child is accepted whatever the main stream says."""

    def wrong(tree: DraftTree, choose: Callable[[int], int], over: Callable[[], bool]) -> Verdict:
        verdict = verify(tree, choose, over)
        children = tree.topology.children[0]
        if not children or len(verdict.path) > 1:
            return verdict
        return Verdict((0, children[0]), choose(children[0]))

    monkeypatch.setattr("forestream.rows.verify", wrong)


@pytest.mark.parametrize(
    ("fault", "host", "settings"),
    [
        (one_wrong_edge, "llama", {"tree": "full", "k": 2, "streams": 2}),
        (one_wrong_edge, "gpt2", {"tree": "full", "k": 2, "streams": 2, "carriers": "fused"}),
        (positions_off_by_one, "llama", {}),
        (positions_off_by_one, "gpt2", {}),
        (commit_shifted, "llama", {}),
        (commit_shifted, "opt-pre", {}),
        (trunk_paths_for_stream_layers, "llama", {"tree": "full", "prune_to": 6}),
        (window_too_wide, "mistral-window", {}),
        (window_too_wide, "gemma3", {}),
        (accepts_too_much, "llama", {}),
    ],
)
def test_equality_notices(fault: Any, host: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 60
    here = lively(model_of(host, "lossless"), tokens)
    here.check(tokens, **settings)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="differs at"):
        here.check(tokens, **settings)
