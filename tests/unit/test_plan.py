"""A plan against passes that are really run: rows, operations, bytes kept; and its arithmetic by hand."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import zoo
from forestream.compiled import EagerLayers
from forestream.data import Tokens, restrict_drafts
from forestream.model import StreamingLM
from forestream.objective import LossConfig, TargetBatch, joint_loss
from forestream.plan import (
    Activations,
    Layer,
    Measured,
    Memory,
    Rows,
    Sizes,
    Spread,
    batches_of,
    planned,
    rows_of,
    seconds_for,
    without_streams,
)
from forestream.recomputed import RecomputedLayers
from forestream.trainer import StreamTrainer
from forestream.training import TrainConfig, collator, fit, ordered, usable
from forestream.trial import Trial, kept_bytes, one_pass
from wrapped import prompt, trainable, trained

LOSS = LossConfig()


def examples(count: int, seed: int = 0) -> list[Tokens]:
    """Ragged, some of whose completions carry no stream."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        before, after = torch.randint(1, 20, (2,), generator=generator).tolist()
        found.append(Tokens(prompt(before, seed=i), prompt(1 if i % 5 == 4 else 2 + after, seed=1000 + i)))
    return found


def trial(model: StreamingLM, count: int = 14, loss: LossConfig = LOSS, **settings: Any) -> Trial:
    config = TrainConfig(**{"batch_size": 4, "dtype": "float32", **settings})
    collate = collator(model.stream_config.streams, 0, config)
    return Trial(model, ordered(examples(count), config, 0), collate, config, loss)


def eager(host: str) -> Any:
    """The host with attention in plain products, which can be counted."""
    base = zoo.HOSTS[host]()
    base.set_attn_implementation("eager")
    return base


# --- rows -----------------------------------------------------------------------------------------------------


def seen_rows(model: StreamingLM, batch: TargetBatch) -> tuple[list[int], int]:
    """Slots that every layer is handed in one pass, and rows that the head is."""
    slots: list[int] = []
    head: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: slots.append(given[0].shape[0] * given[0].shape[1]))
        for layer in model.port.layers
    ]
    output = model.port.model.get_output_embeddings()
    hooks.append(output.register_forward_pre_hook(lambda _, given: head.append(len(given[0]))))
    joint_loss(model, one_pass(model, batch, TrainConfig(dtype="float32")), batch, LOSS)
    for hook in hooks:
        hook.remove()
    return slots, sum(head)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({"streams": 1}, {"targets": "all"}),
        ({"streams": 0}, {}),
        ({"scorer_rank": 0}, {"share": 0.6}),
        ({"stream_layers": 4}, {"batch_size": 5}),
    ],
)
def test_rows_are_those_that_layers_and_head_are_handed(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    model = trainable("llama", **changes)
    tried = trial(model, **settings)
    trunk = len(model.trunk_layers)
    for texts, rows in zip(tried.batches, tried.rows, strict=True):
        slots, head = seen_rows(model, tried.collate.batch(texts))
        assert slots == [rows.main] * trunk + [rows.slots] * (4 - trunk)
        assert head == rows.head
        assert len(rows.heads) == len(tried.terms) == 1 + model.stream_config.streams + (model.scorer is not None)


def test_rows_of_a_batch_by_hand() -> None:
    texts = [Tokens((1, 2, 3), (4, 5, 6, 7)), Tokens((1,), (2, 3))]
    config = TrainConfig()
    rows = rows_of(texts, collator(2, 0, config), scored=True)
    # Inputs of 6 and 2 tokens; carriers 3 (the last two positions have nothing further ahead) and 1.
    assert (rows.main, rows.stream) == (12, 2 * 2 * 3)
    assert rows.padding == 4 + 2 * 2
    assert rows.heads == (6, 3 + 1, 2 + 0, 6)
    assert (rows.trunk_pairs, rows.pairs) == (2 * 6**2, 2 * (6 + 6) ** 2)
    assert rows_of(texts, collator(2, 0, config), scored=False).heads == (6, 4, 2)


def test_batches_are_those_that_the_trainer_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Tensor] = []
    compute = StreamTrainer.compute_loss

    def watched(self: StreamTrainer, model: Any, inputs: dict[str, Tensor], *given: Any, **keywords: Any) -> Any:
        met.append(inputs["ids"])
        return compute(self, model, inputs, *given, **keywords)

    monkeypatch.setattr(StreamTrainer, "compute_loss", watched)
    model = trainable("llama", streams=2)
    config = TrainConfig(batch_size=4, epochs=2, accumulate=3, dtype="float32", max_length=25)
    report = fit(model, examples(23), 0, tmp_path, config, LOSS)
    own = usable(examples(23), config)
    tried = Trial(model, ordered(own, config, 0), collator(2, 0, config), config, LOSS)
    assert report["left_out_as_too_long"] > 0
    assert all(torch.equal(a, tried.collate.batch(b).ids) for a, b in zip(met, tried.batches, strict=True))
    plan = tried.counted()
    assert (plan.passes, plan.updates) == (len(met), report["updates"])
    assert plan.examples == 2 * report["examples"]
    assert plan.main.total == sum(ids.numel() for ids in met)


# --- operations -----------------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """Counts the operations of every product that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), keywords: Any = None) -> Any:
        out = call(*given, **(keywords or {}))
        if call._overloadpacket in flop_registry:
            self.operations += flop_registry[call._overloadpacket](*given, **(keywords or {}), out_val=out)
        return out


def counted(run: Callable[[], Any]) -> int:
    with Counter() as counter:
        run()
    return counter.operations


def learn(model: StreamingLM, batch: TargetBatch) -> None:
    output = one_pass(model, batch, TrainConfig(dtype="float32"))
    joint_loss(model, output, batch, LOSS).total.backward()


@pytest.mark.parametrize("host", ["llama", "gpt2", "opt-pre"])
@pytest.mark.parametrize("mode", ["joint", "lossless"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_operations_are_those_of_a_real_pass(host: str, mode: str, recomputed: bool) -> None:
    model = trainable(eager(host), mode=mode, scorer_rank=0)
    if recomputed:
        model.layers = RecomputedLayers(model.port)
    tried = trial(model, checkpointing=recomputed)
    batch, rows = tried.collate.batch(tried.batches[0]), tried.rows[0]
    head = 2 * tried.sizes.head * rows.head
    assert tried.sizes.forward(rows) - head == counted(lambda: one_pass(model, batch, tried.config))
    found, wanted = tried.sizes.total(rows), counted(lambda: learn(model, batch))
    if mode == "lossless":
        assert found == wanted
    else:
        # Nobody asks for gradients of the embedding, so the first layer's first products have fewer.
        assert wanted < found < 1.02 * wanted


@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_a_draft_vocabulary_takes_the_heads_operations_of_its_tokens(mode: str) -> None:
    """What does not go through the head is what it is without one."""
    model = trainable(eager("llama"), mode=mode, scorer_rank=0)
    free = trial(model)
    restrict_drafts(model, examples(14), 0, 30)
    tried = trial(model)
    batch, rows, whole = tried.collate.batch(tried.batches[0]), tried.rows[0], free.rows[0]
    assert rows.heads[0] == whole.heads[0]
    assert 0 < rows.ahead < whole.ahead == sum(whole.heads[1:])
    width = model.port.hidden_size
    fewer = 2 * 2 * width * (89 * whole.ahead - 30 * rows.ahead)
    assert free.sizes.total(whole) - tried.sizes.total(rows) == fewer
    found, wanted = tried.sizes.total(rows), counted(lambda: learn(model, batch))
    assert found == wanted if mode == "lossless" else wanted < found < 1.02 * wanted
    assert tried.sizes.lora_only() == free.sizes.lora_only()


def test_the_ratio_is_that_to_a_real_twin() -> None:
    model, twin = (trainable(eager("llama"), streams=streams, scorer_rank=0) for streams in (4, 0))
    tried, plain = trial(model, count=9), trial(twin, count=9)
    assert tried.sizes.lora_only() == plain.sizes
    assert [without_streams(rows) for rows in tried.rows] == [
        Rows(rows.main, 0, 0, rows.heads, rows.trunk_pairs, rows.pairs) for rows in plain.rows
    ]
    spent = []
    for own, model_of in ((tried, model), (plain, twin)):
        spent.append(sum(counted(partial(learn, model_of, own.collate.batch(texts))) for texts in own.batches))
    assert tried.counted().over_lora == pytest.approx(spent[0] / spent[1], rel=0.02)
    assert plain.counted().over_lora == 1.0


def test_a_lossless_plan_is_held_against_a_lora_on_all_layers() -> None:
    lossless, joint = (trial(trainable("llama", mode=mode, scorer_rank=0)) for mode in ("lossless", "joint"))
    assert lossless.sizes.lora_only() == joint.sizes.lora_only()
    assert lossless.counted().over_lora < joint.counted().over_lora


def test_operations_of_sizes_by_hand() -> None:
    sizes = Sizes((Layer(100, 10, 3), Layer(200, 0, 5)), trunk=1, head=7, trunk_learns=True)
    rows = Rows(main=2, stream=4, padding=0, heads=(1, 2), trunk_pairs=4, pairs=36)
    assert sizes.forward(rows) == 2 * 2 * 110 + 4 * 3 + 2 * 6 * 200 + 36 * 5 + 2 * 7 * 3
    backward = 2 * (2 * 100 + 4 * 10) + 2 * 4 * 3 + 6 * 2 * 200 + 2 * 36 * 5 + 2 * 7 * 3
    assert sizes.backward(rows) == backward
    fixed = Sizes(sizes.layers, 1, 7, trunk_learns=False)
    assert fixed.backward(rows) == backward - 2 * (2 * 100 + 4 * 10) - 2 * 4 * 3
    assert fixed.forward(rows) == sizes.forward(rows)


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"mode": "lossless"}, {"streams": 0}])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_activations_of_the_largest_pass_are_foretold(changes: dict[str, Any], attention: str) -> None:
    base = zoo.HOSTS["llama"]()
    base.set_attn_implementation(attention)
    model = trainable(base, **changes)
    tried = trial(model)
    memory = tried.measured().memory
    assert memory is not None
    largest = max(tried.rows, key=tried.sizes.total)
    batch = tried.collate.batch(tried.batches[tried.rows.index(largest)])
    model.train()
    assert memory.activations == pytest.approx(kept_bytes(model, batch, tried.config), rel=0.05)


def test_recomputed_layers_keep_less() -> None:
    model = trainable("llama")
    kept = [trial(model, checkpointing=checkpointing).measured().memory for checkpointing in (False, True)]
    assert kept[0] is not None
    assert kept[1] is not None
    assert kept[1].activations < 0.6 * kept[0].activations
    assert kept[1].trained == kept[0].trained


def test_memory_of_weights_is_that_of_the_parameters() -> None:
    model = trainable(zoo.HOSTS["llama-tied"]().bfloat16())
    memory = trial(model, dtype="bfloat16").measured().memory
    assert memory is not None
    learned = sum(parameter.numel() * 4 for parameter in trained(model).values())
    frozen = sum(p.numel() * 2 for p in model.parameters() if not p.requires_grad)
    assert (memory.weights, memory.trained, memory.gradients) == (frozen, learned, learned)
    assert memory.optimizer == 2 * learned
    assert Memory(1, 2, 4, 8, 16, 32).peak == 63


def test_activations_are_fitted_to_two_passes() -> None:
    true = Activations(slot=100.0, pair=3.0)
    points = [(slots, pairs, round(true.bytes(slots, pairs))) for slots, pairs in ((10, 40), (50, 900))]
    found = Activations.fitted(*points)
    assert (found.slot, found.pair) == pytest.approx((100.0, 3.0))
    alike = Activations.fitted((10, 40, 1000), (20, 80, 2000))
    assert (alike.slot, alike.pair) == (100.0, 0.0)


# --- seconds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operations", "seconds"), [(5, 0.5), (10, 1.0), (15, 1.5), (20, 2.0), (30, 5.0), (80, 16.0)])
def test_seconds_lie_between_those_measured(operations: float, seconds: float) -> None:
    measured = [Measured(40, 8.0, None), Measured(10, 1.0, None), Measured(20, 2.0, None)]
    assert seconds_for(operations, measured) == pytest.approx(seconds)


def test_seconds_of_passes_of_one_size_are_a_mean_or_one_of_them() -> None:
    measured = [Measured(10, 1.0, None), Measured(10, 3.0, None)]
    assert 1.0 <= seconds_for(10, measured) <= 3.0


# --- the plan -------------------------------------------------------------------------------------------------


def test_a_plan_sums_up_its_passes() -> None:
    sizes = Sizes((Layer(10, 1, 1),), trunk=0, head=3, trunk_learns=True)
    rows = [Rows(n, 2 * n, n, (n, 1), n, 9 * n) for n in (1, 2, 6)]
    measured = [Measured(sizes.total(one), one.main / 10, 100 + one.main) for one in reversed(rows)]
    plan = planned(rows, sizes, ("main", "stream_1"), TrainConfig(accumulate=2), 9, None, measured)
    assert (plan.examples, plan.passes, plan.updates) == (9, 3, 2)
    assert (plan.main, plan.stream) == (Spread(3, 6, 9), Spread(6, 12, 18))
    assert plan.head == {"main": Spread(3, 6, 9), "stream_1": Spread(1, 1, 3)}
    assert plan.padding == pytest.approx(1 / 3)
    assert plan.forward.total == sum(map(sizes.forward, rows))
    assert [one.operations for one in plan.measured] == sorted(one.operations for one in measured)
    assert plan.seconds == pytest.approx(0.9)
    assert plan.seconds_per_update == pytest.approx(0.45)
    assert "3 passes in 2 updates; a pass has 3 main and 6 stream slots on average, 33% of them padding" in plan.line()


def test_processes_share_the_passes_of_a_plan() -> None:
    """An update takes as many passes of each of them, and they run side by side."""
    config = TrainConfig(batch_size=4, accumulate=2, dtype="float32")
    model = trainable("llama")
    collate = collator(model.stream_config.streams, 0, config)
    plan = Trial(model, ordered(examples(30), config, 0, 2), collate, config, LOSS, 2).counted()
    assert (plan.examples, plan.passes, plan.updates, plan.processes) == (30, 8, 2, 2)
    assert "8 passes in 2 updates of 2 processes;" in plan.line()
    sizes = Sizes((Layer(10, 1, 1),), trunk=0, head=3, trunk_learns=True)
    rows = [Rows(4, 8, 4, (4,), 4, 36)] * 6
    measured = [Measured(sizes.total(rows[0]), 0.5, 100)]
    plan = planned(rows, sizes, ("main",), config, 24, None, measured, 3)
    assert (plan.updates, plan.seconds, plan.seconds_per_update) == (1, 1.0, 1.0)


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = trainable("llama").eval()
    before = trained(model)
    tried = trial(model, checkpointing=True)
    steps: list[None] = []
    plan = tried.measured(done=lambda: steps.append(None))
    assert len(steps) == 4
    assert [one.operations for one in plan.measured][-1] == max(map(tried.sizes.total, tried.rows))
    assert all(one.seconds > 0 and one.peak_bytes for one in plan.measured)
    assert plan.seconds is not None
    assert plan.seconds > 0
    assert not model.training
    assert type(model.layers) is EagerLayers
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], parameter) for name, parameter in trained(model).items())


def test_a_single_batch_can_be_planned() -> None:
    plan = trial(trainable("llama", streams=1), count=3).measured()
    assert plan.passes == 1
    assert len(plan.measured) == 1
    assert plan.seconds == pytest.approx(plan.measured[0].seconds)
    assert plan.memory is not None
    assert plan.record()["memory"]["peak"] == plan.memory.peak


def test_batches_end_with_the_rest() -> None:
    config = TrainConfig(batch_size=4)
    data = ordered(examples(10), config, 0)
    assert [len(batch) for batch in batches_of(data, 4)] == [4, 4, 2]
