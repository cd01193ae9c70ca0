"""A base's own answers: written, gone on with, refused; and the commands, from answers to lossless streams."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from forestream import checkpoint
from forestream.bases import fingerprint, load_base
from forestream.cli import app
from forestream.config import DecodeSettings, StreamConfig
from forestream.data import Tokens, drawn, prompt_ids, template_print
from forestream.distillation import AnswerSettings, base_generator, read_answers, write_answers
from forestream.errors import CheckpointError, ConfigError, DataError
from forestream.evaluation import conversation, outputs
from forestream.generation import Generator
from forestream.manifest import BaseModel, Manifest
from forestream.model import StreamingLM
from forestream.tasks import Example
from tiny import tiny_adapter, tiny_base
from wrapped import SMALL

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[a] {% endif %}"
)
SAID = ["Name a colour.", "Why?", "Write two lines.", "Count to three.", "Say nothing."]
ROWS = [Example(text, "An answer.", ("An answer.",), form="chat") for text in SAID]
FLOAT32 = ("--dtype", "float32")
CAP = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that was told how chats are rendered, and ends some of its texts."""
    folder = tiny_base(tmp_path_factory.mktemp("distil") / "base")
    give_template(folder, TEMPLATE)
    return folder


def give_template(folder: Path, template: str) -> None:
    _, tokenizer = load_base(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def written(base: Path) -> tuple[Generator, AnswerSettings]:
    generator, found = base_generator(str(base), torch.float32)
    template = template_print(generator.tokenizer)
    return generator, AnswerSettings("chat", "train", found, template, "float32", max_new_tokens=CAP)


def answer(
    written: tuple[Generator, AnswerSettings],
    path: Path,
    order: list[int] | None = None,
    batch_size: int = 2,
    **changes: Any,
) -> AnswerSettings:
    generator, settings = written
    settings = AnswerSettings(**(vars(settings) | changes))
    examples = {index: ROWS[index] for index in (order or range(len(ROWS)))}
    write_answers(generator, examples, path, settings, {"commit": None}, batch_size)
    return settings


def write(data: Path, folder: str, split: str, rows: list[dict[str, Any]]) -> None:
    """A data set's file, as the tasks read it."""
    (data / folder).mkdir()
    with gzip.open(data / folder / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[1:-1]]


# --- what is written ------------------------------------------------------------------------------------------------


def test_answers_are_what_the_base_itself_writes(
    base: Path, written: tuple[Generator, AnswerSettings], tmp_path: Path
) -> None:
    """By the host library's own generate on the rendered prompt, ids and all."""
    path = tmp_path / "new folder" / "answers.jsonl"
    settings = answer(written, path)
    host, tokenizer = load_base(str(base))
    head = json.loads(path.read_text().split("\n")[0])
    assert head == {"format": 1, "settings": vars(settings), "provenance": {"commit": None}}
    found = lines_of(path)
    assert [line["index"] for line in found] == [0, 1, 2, 3, 4]
    for line, row in zip(found, ROWS, strict=True):
        ids = torch.tensor([tokenizer(f"[u] {row.prompt}\n[a] ")["input_ids"]])
        out = host.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=CAP, do_sample=False, pad_token_id=1
        )
        assert line["completion"] == out[0, ids.shape[1] :].tolist()
        assert line["text"] == tokenizer.decode(line["completion"], skip_special_tokens=True)
        assert line["finish"] == ("stop" if line["completion"][-1] == tokenizer.eos_token_id else "length")


def test_an_answer_that_ends_holds_its_end_and_one_that_is_cut_off_holds_none(
    written: tuple[Generator, AnswerSettings], tmp_path: Path
) -> None:
    generator, settings = written
    answer(written, tmp_path / "cut off")
    whole = lines_of(tmp_path / "cut off")
    assert all(line["finish"] == "length" for line in whole)
    ending = Generator(generator.model, generator.tokenizer)
    ending.eos = (whole[0]["completion"][4],)
    answer((ending, settings), tmp_path / "ended")
    for line, longer in zip(lines_of(tmp_path / "ended"), whole, strict=True):
        ids = longer["completion"]
        end = ids.index(ending.eos[0]) + 1 if ending.eos[0] in ids else CAP
        assert line["completion"] == ids[:end]
        assert line["finish"] == ("stop" if ending.eos[0] in ids else "length")
    assert lines_of(tmp_path / "ended")[0]["finish"] == "stop"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_base_is_recognised_in_every_dtype(
    base: Path, written: tuple[Generator, AnswerSettings], dtype: torch.dtype
) -> None:
    generator, found = base_generator(str(base), dtype)
    assert found == written[1].fingerprint
    assert generator.model.dtype == dtype


def test_draws_depend_on_the_row_and_not_on_its_mates(
    written: tuple[Generator, AnswerSettings], tmp_path: Path
) -> None:
    law = {"temperature": 1.5, "seed": 3}
    answer(written, tmp_path / "together", batch_size=5, **law)
    answer(written, tmp_path / "apart", order=[3, 1, 4, 0, 2], batch_size=1, **law)
    answer(written, tmp_path / "other", batch_size=5, **(law | {"seed": 4}))
    together, apart, other = (
        {line["index"]: line["completion"] for line in lines_of(tmp_path / name)}
        for name in ("together", "apart", "other")
    )
    assert together == apart
    assert together != other


def test_drafts_of_a_lossless_adapter_change_no_answer(
    base: Path, written: tuple[Generator, AnswerSettings], tmp_path: Path
) -> None:
    answer(written, tmp_path / "plain")
    drafting = Generator.from_pretrained(
        tiny_adapter(tmp_path / "lossless", base, mode="lossless"), dtype=torch.float32
    )
    answer((drafting, written[1]), tmp_path / "drafted")
    assert (tmp_path / "drafted").read_text() == (tmp_path / "plain").read_text()
    joint = Generator.from_pretrained(tiny_adapter(tmp_path / "joint", base), dtype=torch.float32)
    with pytest.raises(ConfigError, match="joint adapter, which writes another text than its base"):
        answer((joint, written[1]), tmp_path / "other")


def test_a_prompt_that_fills_the_context_is_left_out(written: tuple[Generator, AnswerSettings], tmp_path: Path) -> None:
    generator, settings = written
    long = Example("x" * 600, "", (), form="chat")
    done: list[int] = []
    found = write_answers(generator, {0: ROWS[0], 1: long}, tmp_path / "file", settings, {}, advance=done.append)
    assert [line["index"] for line in lines_of(tmp_path / "file")] == [0]
    assert sum(done) == 2
    assert (found.left_out, found.counters.prompts, found.counters.generated) == (1, 1, CAP)


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_killed_run_is_gone_on_with(written: tuple[Generator, AnswerSettings], tmp_path: Path) -> None:
    """Wherever the file was cut, also inside a line and inside a character, it ends up the same."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    answer(written, whole)
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in (0, 10, ends[0], ends[0] + 5, ends[2], ends[3] - 1, len(data)):
        cut.write_bytes(data[:size])
        answer(written, cut)
        assert cut.read_bytes() == data
    cut.write_bytes(data[: ends[2]] + '{"text": "é'.encode()[:-1])
    answer(written, cut)
    assert cut.read_bytes() == data


def test_more_examples_go_behind_fewer(written: tuple[Generator, AnswerSettings], tmp_path: Path) -> None:
    orders = [drawn(range(5), 7, most) for most in (2, 4, None)]
    assert orders[0] == orders[1][:2] == orders[2][:2]
    assert sorted(orders[2]) == list(range(5))
    assert drawn(range(5), 8) != orders[2]
    for order in orders:
        answer(written, tmp_path / "file", order)
        assert [line["index"] for line in lines_of(tmp_path / "file")] == order


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_new_tokens": 9}, "another setting of max_new_tokens .max_new_tokens 12, now 9."),
        ({"temperature": 0.5, "seed": 1}, "another setting of temperature, seed"),
        ({"chat_template": "0" * 64}, "another setting of chat_template"),
        ({"fingerprint": "0" * 64}, "another setting of fingerprint"),
        ({"dtype": "bfloat16"}, "another setting of dtype"),
        ({"task": "e2e", "split": "validation"}, "another setting of task, split"),
    ],
)
def test_other_settings_are_refused_by_name(
    written: tuple[Generator, AnswerSettings], tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    answer(written, tmp_path / "file", [0])
    before = (tmp_path / "file").read_bytes()
    with pytest.raises(DataError, match=told):
        answer(written, tmp_path / "file", **changes)
    assert (tmp_path / "file").read_bytes() == before


def test_other_prompts_are_refused(written: tuple[Generator, AnswerSettings], tmp_path: Path) -> None:
    answer(written, tmp_path / "file")
    generator, settings = written
    with pytest.raises(DataError, match="answers another prompt in row 1 than the data hold there"):
        write_answers(generator, {1: ROWS[0]}, tmp_path / "file", settings, {})


@pytest.mark.parametrize("changes", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"seed": -1}])
def test_impossible_settings_are_refused(written: tuple[Generator, AnswerSettings], changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} is "):
        AnswerSettings(**(vars(written[1]) | changes))


# --- what is read --------------------------------------------------------------------------------------------


def test_ids_are_trained_on_as_they_were_written(written: tuple[Generator, AnswerSettings], tmp_path: Path) -> None:
    """Also those that no tokenizer would make of the text; and nothing is added where an answer was cut off."""
    generator, settings = written
    answer(written, tmp_path / "file", [3, 0])
    head, *rest = (tmp_path / "file").read_text().split("\n")
    first = json.loads(rest[0]) | {"completion": [9, 9, 1], "text": "z\u2028z", "finish": "stop"}
    second = json.loads(rest[1])
    (tmp_path / "file").write_text(f"{head}\n{json.dumps(first, ensure_ascii=False)}\n{rest[1]}\n")
    found = read_answers(tmp_path / "file", ROWS, generator.tokenizer, settings.fingerprint)
    assert found[0] == Tokens(prompt_ids(generator.tokenizer, ROWS[3].asked), (9, 9, 1))
    assert found[1] == Tokens(prompt_ids(generator.tokenizer, ROWS[0].asked), tuple(second["completion"]))
    assert second["finish"] == "length"
    assert generator.tokenizer.eos_token_id not in found[1].completion
    assert len(found[1].completion) == CAP


def test_answers_that_do_not_fit_are_refused(written: tuple[Generator, AnswerSettings], tmp_path: Path) -> None:
    generator, settings = written
    path = tmp_path / "file"
    answer(written, path)

    def refused(rows: list[Example] = ROWS, base_print: str = settings.fingerprint) -> str:
        with pytest.raises(DataError) as caught:
            read_answers(path, rows, generator.tokenizer, base_print)
        return str(caught.value)

    assert "was written by a base with fingerprint" in refused(base_print="f" * 64)
    assert "answers row 4, and there are 4 rows" in refused(ROWS[:4])
    assert "answers another prompt in row 0" in refused(ROWS[::-1])
    texts = [Example(text, " a", ("a",)) for text in SAID]
    assert "the base to train has none" in refused(texts)
    path.write_text(path.read_text().replace('"train"', '"test"', 1))
    assert "answers the test split" in refused()
    with pytest.raises(DataError, match="answers prompts of chat; expected e2e, or give --task chat"):
        AnswerSettings.read(path, "e2e")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "found no file"),
        (b"\xff\n", "could not be read"),
        (b"", "the first line of .* is none that `forestream distill` wrote"),
        (b"[1]\n", "the first line of .* is none"),
        (b'{"format": 2}\n', "has format 2; this version reads format 1"),
        (b'{"format": 1, "settings": {"task": "chat"}}\n', "the first line of .* is none"),
        (b"HEAD\n", "holds no answer yet"),
        (b"HEAD\n{}\n", "line 2 of .* is no answer: it has the fields none"),
        (b"HEAD\nLINE\nnot JSON\n", "line 3 of .* is no answer"),
        (b'HEAD\n{"index": -1, "prompt": "", "completion": [1], "text": "", "finish": "stop"}\n', "its index is -1"),
        (b'HEAD\n{"index": 0, "prompt": "", "completion": [], "text": "", "finish": "stop"}\n', "no list of token ids"),
    ],
)
def test_a_file_that_is_none_of_answers_is_named(
    written: tuple[Generator, AnswerSettings], tmp_path: Path, text: bytes | None, told: str
) -> None:
    answer(written, tmp_path / "right", [0])
    head, line, _ = (tmp_path / "right").read_bytes().split(b"\n")
    path = tmp_path / "file"
    if text is not None:
        path.write_bytes(text.replace(b"HEAD", head).replace(b"LINE", line))
    with pytest.raises(DataError, match=told):
        read_answers(path, ROWS, written[0].tokenizer, written[1].fingerprint)


# --- chats ------------------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_the_models_own_answers(
    base: Path, written: tuple[Generator, AnswerSettings], tmp_path: Path
) -> None:
    adapter = tiny_adapter(tmp_path / "lossless", base, mode="lossless")
    generator = Generator.from_pretrained(
        adapter, dtype=torch.float32, settings=DecodeSettings(nodes=6, max_new_tokens=CAP)
    )
    chat = Example("Hello.", "", (), form="chat", turns=("And then?", "Stop."))
    answers = conversation(generator, chat)
    assert [one.tokens for one in answers] == [one.tokens for one in conversation(generator, chat, "plain")]
    said = ""
    for turn, one in zip(("Hello.", *chat.turns), answers, strict=True):
        said += f"[u] {turn}\n[a] "
        assert one.tokens == generator.generate(said).tokens
        said += f"{one.text}\n"
    first = outputs(generator, [chat], "forestream")
    assert first == outputs(generator, [chat], "plain") == outputs(generator, [chat], "batched") == [answers[0].text]
    together = generator.generate_batch([chat.asked, "[u] Hello.\n[a] "])
    assert together[0].tokens == together[1].tokens == answers[0].tokens


def adapter_for_chats(base: Path, folder: Path, template: str | None) -> Path:
    host, _ = load_base(str(base))
    origin = BaseModel(str(base), host.config.model_type, fingerprint(host), "float32", template)
    model = StreamingLM(host, StreamConfig(**SMALL))
    model.add_lora()
    checkpoint.save(model, folder, origin, {})
    return folder


def test_an_adapter_for_chats_wants_the_template_it_was_trained_with(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base")
    give_template(base, TEMPLATE)
    template = template_print(load_base(str(base))[1])
    chats, texts = (adapter_for_chats(base, tmp_path / name, t) for name, t in (("chats", template), ("texts", None)))
    assert Manifest.read(chats).base.chat_template == template
    checkpoint.load(chats)
    give_template(base, f"{TEMPLATE} ")
    with pytest.raises(CheckpointError, match=r"was trained on chats in the template .* other prompts"):
        checkpoint.load(chats)
    checkpoint.load(texts)  # which never used one


# --- the commands --------------------------------------------------------------------------------------------


def forestream(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "100"})


def done(*arguments: object) -> Result:
    result = forestream(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: object) -> str:
    result = forestream(*arguments)
    assert result.exit_code == (2 if arguments[0] == "evaluate" else 1), result.output  # where 1 is an answer
    return result.stderr


def test_from_answers_to_lossless_streams(base: Path, tmp_path: Path) -> None:
    keys = ("instruction", "input", "output", "source")
    write(tmp_path, "instruct", "train", [dict(zip(keys, (said, "", "x", "made"), strict=True)) for said in SAID])
    answers, adapter = tmp_path / "answers.jsonl", tmp_path / "adapter"
    data = ("--task", "chat", "--data-dir", tmp_path)
    write_them = ("distill", *data, "--base", base, "--output", answers, *FLOAT32, "--max-new-tokens", CAP)
    told = done(*write_them, "--examples", 2).stderr
    assert "2 answers written, 24 tokens" in told
    assert "3 answers written" in done(*write_them).stderr
    assert "0 answers written" in done(*write_them).stderr
    assert json.loads(answers.read_text().split("\n")[0])["provenance"]["command"]
    assert "another setting of seed" in refused(*write_them, "--seed", 1)

    train = ("train", *data, "--base", base, "--stream-layers", 2, "--batch-size", 2, *FLOAT32)
    learn = (*train, "--mode", "lossless", "--answers", answers, "--target", "both")
    done(*learn, "--output", adapter)
    record = json.loads((adapter / "provenance.json").read_text())
    assert record["examples"] == 5
    assert record["loss"]["target"] == "both"
    assert record["answers"]["max_new_tokens"] == CAP
    assert {"stream_1_loss", "stream_1_accuracy", "stream_1_soft_loss"} <= set(record["last_log"])
    assert Manifest.read(adapter).base.chat_template == record["answers"]["chat_template"]

    say = ("generate", "--adapter", adapter, *FLOAT32, "--max-new-tokens", CAP, "--chat", SAID[0])
    own = next(line["text"] for line in lines_of(answers) if line["index"] == 0)
    assert done(*say).stdout == done(*say, "--plain").stdout == f"{own}\n"
    drafted = (*write_them[:-2], "--max-new-tokens", CAP, "--adapter", adapter, "--output", tmp_path / "again")
    done(*drafted)
    assert lines_of(tmp_path / "again") == lines_of(answers)
    check = ("verify", "--adapter", adapter, *data, "--split", "train", *FLOAT32, "--max-new-tokens", 8)
    assert "5 of 5" in done(*check).stdout

    joint = tiny_adapter(tmp_path / "joint", base)
    assert "is a joint adapter" in refused(*drafted, "--adapter", joint)
    assert "scores no texts" in refused("evaluate", "--adapter", adapter, "--task", "spec_bench")
    assert "expected e2e" in refused(*train[:2], "e2e", *train[3:], "--answers", answers, "--output", tmp_path / "no")


def test_bench_tells_which_part_each_prompt_is_of(base: Path, tmp_path: Path) -> None:
    rows = [{"category": kind, "turns": [f"{kind}?"]} for kind in ("writing", "qa")]
    write(tmp_path, "spec_bench", "test", rows)
    adapter = tiny_adapter(tmp_path / "lossless", base, mode="lossless")
    done(
        *("bench", "--adapter", adapter, "--task", "spec_bench", "--data-dir", tmp_path, *FLOAT32),
        *("--max-new-tokens", 8, "--json", tmp_path / "out.json"),
    )
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["categories"] == ["mt_bench", "qa"]
    assert len(record["methods"]["forestream"]["per_prompt"]["tokens"]) == 2
    assert record["methods"]["forestream"]["equal_outputs"] == 2
