"""Tasks: rendering, grouping, local files and their faults, a fake hub, and real data when given."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest

from forestream.errors import ConfigError, DataError
from forestream.tasks import TASKS, Example, Synthetic, Task, get_task
from forestream.tasks.rows import rows
from forestream.tasks.spec_bench import CATEGORIES
from forestream.tasks.sql import held_out_split
from forestream.tasks.synthetic import WORDS

MEANING = "name[Alimentum], area[city centre]"


def write(data: Path, folder: str, split: str, found: list[dict[str, Any]]) -> Path:
    path = data / folder / f"{split}.jsonl.gz"
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)
    return path


def test_tasks_are_found_by_name() -> None:
    names = ["e2e", "sql", "dialogsum", "chat", "spec_bench", "gsm8k", "humaneval", "synthetic"]
    assert [task.name for task in TASKS] == names
    assert all(get_task(task.name) is task for task in TASKS)
    with pytest.raises(ConfigError, match="found task 'e2'; expected one of e2e, sql"):
        get_task("e2")


# --- rendering and grouping ---------------------------------------------------------------------------------


def test_e2e_keeps_rows_for_training_and_groups_them_for_evaluation(tmp_path: Path) -> None:
    texts = [(MEANING, "A place. "), ("name[B]", "B it is."), (MEANING, "Café it is."), (MEANING, "A place.")]
    write(tmp_path, "e2e_nlg", "test", [{"meaning_representation": m, "human_reference": t} for m, t in texts])
    task = get_task("e2e")
    assert [e.completion for e in task.examples("test", tmp_path)] == [
        " A place.",
        " B it is.",
        " Café it is.",
        " A place.",
    ]
    first, second = task.grouped("test", tmp_path)
    assert first == Example(f"{MEANING} ->", " A place.", ("A place.", "Café it is."))
    assert second == Example("name[B] ->", " B it is.", ("B it is.",))
    assert task.score(["Café it is.", "B it is."], [first, second]) == {"rouge1": 100.0, "rougeLsum": 100.0}


def test_sql_renders_tables_then_question(tmp_path: Path) -> None:
    row = {
        "context": "CREATE TABLE t (a INTEGER)",
        "question": " How many? ",
        "answer": "SELECT COUNT(*) FROM t",
    }
    write(tmp_path, "sql_create_context", "train", [row | {"source": "elsewhere"}])
    task = get_task("sql")
    (example,) = task.examples("train", tmp_path)
    assert example.prompt == "CREATE TABLE t (a INTEGER)\nHow many?\nSQL:"
    assert example.completion == " SELECT COUNT(*) FROM t"
    assert task.score(["SELECT COUNT(*)  FROM t ;"], [example]) == {"exact_match": 100.0}
    assert task.score(["SELECT COUNT(*) FROM u"], [example]) == {"exact_match": 0.0}


def test_dialogsum_reads_one_row_with_three_summaries_like_three_rows_with_one(tmp_path: Path) -> None:
    dialogue = "#Person1#: Hi.\n#Person2#: Hi. "
    wide = {"dialogue": dialogue, "summary1": "One.", "summary2": "Two.", "summary3": "Three."}
    write(tmp_path, "dialogsum", "wide", [wide])
    write(
        tmp_path,
        "dialogsum",
        "long",
        [{"dialogue": dialogue, "summary": wide[f"summary{i}"]} for i in (1, 2, 3)],
    )
    task = get_task("dialogsum")
    assert len(task.examples("wide", tmp_path)) == 1
    assert len(task.examples("long", tmp_path)) == 3
    expected = [
        Example("#Person1#: Hi.\n#Person2#: Hi.\nSummary:", " One.", ("One.", "Two.", "Three.")),
    ]
    assert task.grouped("wide", tmp_path) == expected
    assert task.grouped("long", tmp_path) == expected


def test_dialogsum_names_the_row_without_a_summary(tmp_path: Path) -> None:
    good, bad = {"dialogue": "Hi.", "summary": "Hi."}, {"dialogue": "Hi.", "summary1": "Hi."}
    write(tmp_path, "dialogsum", "test", [good, bad])
    with pytest.raises(DataError, match=r"row 2 of split 'test'.*dialogue, summary1; expected"):
        get_task("dialogsum").examples("test", tmp_path)


INSTRUCTION = {"instruction": "Translate. ", "input": "Guten Tag", "output": " Good day\n", "source": "alpaca"}


def test_chat_is_what_a_user_says_and_the_answer(tmp_path: Path) -> None:
    bare = INSTRUCTION | {"input": "", "source": "code_alpaca"}
    write(tmp_path, "instruct", "train", [INSTRUCTION, bare])
    task = get_task("chat")
    with_input, without = task.examples("train", tmp_path)
    assert with_input == Example("Translate.\n\nGuten Tag", "Good day", ("Good day",), form="chat", category="alpaca")
    assert (without.prompt, without.category) == ("Translate.", "code_alpaca")
    assert with_input.asked == [{"role": "user", "content": "Translate.\n\nGuten Tag"}]
    assert task.score(["Good day"], [with_input]) == {"rouge1": 100.0, "rougeLsum": 100.0}


@pytest.mark.parametrize(
    ("name", "split", "fields"), [("chat", "train", "instruct/train.jsonl.gz"), ("spec_bench", "test", "category")]
)
def test_sets_that_are_on_no_hub_say_which_files_they_expect(
    name: str, split: str, fields: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setattr(datasets, "load_dataset", hub)
    with pytest.raises(DataError, match="is on no hub and is read from a folder only: give --data-dir DIR") as caught:
        get_task(name).examples(split)
    assert fields in str(caught.value)
    assert not hub.calls


def test_spec_bench_keeps_turns_and_six_categories(tmp_path: Path) -> None:
    found = [
        {"question_id": 81, "category": "writing", "turns": ["Write a post. ", "Shorter."]},
        {"question_id": 1, "category": "translation", "turns": ["Übersetze."], "reference": ["Translate."]},
    ]
    write(tmp_path, "spec_bench", "test", found)
    task = get_task("spec_bench")
    first, second = task.grouped("test", tmp_path)
    assert first == Example("Write a post.", "", (), form="chat", turns=("Shorter.",), category="mt_bench")
    assert (second.category, second.turns) == ("translation", ())
    with pytest.raises(DataError, match="scores no texts; use `forestream bench`"):
        task.score(["a", "b"], [first, second])
    with pytest.raises(DataError, match="found split 'train' of spec_bench; expected test"):
        task.examples("train", tmp_path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"category": "qa"}, "row 1 of spec_bench has None as turns"),
        ({"category": "qa", "turns": []}, r"has \[\] as turns"),
        ({"category": "qa", "turns": ["a", " "]}, "expected a list of texts"),
        ({"category": "chess", "turns": ["a"]}, "of category 'chess'; expected mt_bench, translation"),
    ],
)
def test_a_row_of_spec_bench_that_is_none_is_named(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    write(tmp_path, "spec_bench", "test", [row])
    with pytest.raises(DataError, match=told):
        get_task("spec_bench").examples("test", tmp_path)


@pytest.mark.parametrize(
    ("example", "told"),
    [
        (("say ", "", ()), "ends with white space"),
        (("say", " answer", ()), "answer ' answer' begins or ends with white space"),
    ],
)
def test_a_chat_that_joins_badly_is_refused(example: tuple[str, str, tuple[str, ...]], told: str) -> None:
    with pytest.raises(DataError, match=told):
        Example(*example, form="chat")


def test_only_chats_have_turns() -> None:
    with pytest.raises(DataError, match="found 1 further turns in an example of the form 'text'"):
        Example("a", " b", ("b",), turns=("c",))


@pytest.mark.parametrize(
    ("prompt", "completion", "references"),
    [("", " a", ("a",)), ("p ", " a", ("a",)), ("p", "a", ("a",)), ("p", "  ", ("a",)), ("p", " a", ())],
)
def test_an_example_that_joins_badly_is_refused(prompt: str, completion: str, references: tuple[str, ...]) -> None:
    with pytest.raises(DataError):
        Example(prompt, completion, references)


# --- synthetic ----------------------------------------------------------------------------------------------


def test_synthetic_follows_its_rule() -> None:
    steps = {"up": 1, "down": -1, "skip": 2, "back": -2}
    for example in get_task("synthetic").examples("validation"):
        rule, start = example.prompt.split(" ")
        letters = [ord(letter) - ord("a") for letter in (start, *example.completion.split())]
        assert len(letters) == 17
        assert all((b - a - steps[rule]) % 26 == 0 for a, b in pairwise(letters))
        assert example.completion == " " + example.references[0]
        assert {*example.prompt.split(" "), *example.completion[1:].split(" ")} <= set(WORDS)


def test_synthetic_is_a_function_of_the_seed_and_its_splits_share_no_prompt() -> None:
    task = get_task("synthetic")
    prompts = {split: {e.prompt for e in task.examples(split)} for split in ("train", "validation", "test")}
    assert len(prompts["train"]) > 60
    assert min(len(prompts["validation"]), len(prompts["test"])) >= 5
    assert not prompts["train"] & (prompts["validation"] | prompts["test"])
    assert not prompts["validation"] & prompts["test"]
    assert task.examples("train") == Synthetic().examples("train")
    assert task.examples("train") != Synthetic(seed=1).examples("train")
    # Pinned: another Python or platform must draw the same rows.
    assert [e.prompt for e in task.examples("train")[:4]] == ["skip n", "back t", "down e", "back g"]
    assert len(Synthetic(length=5).examples("test")[0].completion.split()) == 5
    with pytest.raises(DataError, match="found split 'dev'; expected one of train"):
        task.examples("dev")


def test_synthetic_scores_whole_walks() -> None:
    task = get_task("synthetic")
    examples = task.grouped("test")
    right = [e.references[0] for e in examples]
    assert len({e.prompt for e in examples}) == len(examples)
    assert task.score(right, examples) == {"exact_match": 100.0}
    assert task.score([right[0][:-1] + "!", *right[1:]], examples)["exact_match"] == pytest.approx(
        100 * (1 - 1 / len(right))
    )


# --- local files and their faults ---------------------------------------------------------------------------


def test_a_missing_file_names_the_path_and_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, "e2e_nlg", "train", [])
    with pytest.raises(DataError) as caught:
        get_task("e2e").examples("test", tmp_path)
    assert str(tmp_path / "e2e_nlg" / "test.jsonl.gz") in str(caught.value)
    assert "files there: train.jsonl.gz" in str(caught.value)
    assert "--data-dir" in str(caught.value)
    with pytest.raises(DataError, match="files there: none"):
        get_task("sql").examples("test", tmp_path)


def test_rows_keep_order_and_pass_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "d" / "s.jsonl.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(b'{"a": "1"}\n\n{"a": "2", "b": 3}\n'))
    assert rows("d", "hub/d", "s", tmp_path, ("a",)) == [{"a": "1"}, {"a": "2", "b": 3}]


def zipped(text: bytes) -> bytes:
    """The same bytes at any time: they name tests, which have to be called the same in every process."""
    return gzip.compress(text, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped(b'{"a": "1"}\n{"a": \n'), "line 2 of .*s.jsonl.gz is no JSON"),
        (zipped(b'{"a": "1"}\n["a"]\n'), "line 2 of .* holds a list"),
        (zipped(b'{"a": "1"}\n{"b": "1"}\n'), "row 2 of .* no text in field 'a': found the fields b"),
        (zipped(b'{"a": 1}\n'), "row 1 of .* no text in field 'a'"),
        (zipped(b'{"a": "\xff"}\n'), "could not be read after line 0"),
        (zipped(b'{"a": "1"}\n' * 9)[:-12], "could not be read after line"),
        (b'{"a": "1"}\n', "could not be read after line 0"),
        (zipped(b""), "has no rows"),
    ],
)
def test_a_corrupt_file_names_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "d" / "s.jsonl.gz"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        rows("d", "hub/d", "s", tmp_path, ("a",))


# --- the hub, faked -----------------------------------------------------------------------------------------


class Hub:
    """Stands for datasets.load_dataset: remembers its calls and answers from a list."""

    def __init__(self, *answers: list[dict[str, str]] | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, dict[str, str]]] = []

    def __call__(self, name: str, **options: str) -> list[dict[str, str]]:
        self.calls.append((name, options))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_without_a_folder_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([{"meaning_representation": MEANING, "human_reference": "A."}])
    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert get_task("e2e").examples("validation") == [Example(f"{MEANING} ->", " A.", ("A.",))]
    assert hub.calls == [("tuetschek/e2e_nlg", {"split": "validation"})]


def test_a_repository_with_a_script_is_read_from_its_converted_branch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal = RuntimeError("Dataset scripts are no longer supported, but found e2e_nlg.py")
    hub = Hub(refusal, [{"meaning_representation": MEANING, "human_reference": "A."}])
    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert len(get_task("e2e").examples("train")) == 1
    assert hub.calls[1] == ("tuetschek/e2e_nlg", {"split": "train", "revision": "refs/convert/parquet"})


def test_an_unreachable_hub_is_one_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(ConnectionError("Couldn't reach the Hub\nlong trace"))
    monkeypatch.setattr(datasets, "load_dataset", hub)
    with pytest.raises(DataError, match=r"\(ConnectionError: Couldn't reach the Hub\); .*--data-dir") as caught:
        get_task("dialogsum").examples("train")
    assert "dialogsum/train.jsonl.gz" in str(caught.value)
    assert "long trace" not in str(caught.value)
    assert len(hub.calls) == 1


def test_the_one_split_of_sql_is_divided_by_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [f"CREATE TABLE t{i % 400} (a INTEGER)" for i in range(800)]
    table = [{"context": c, "question": f"{i}?", "answer": "SELECT 1"} for i, c in enumerate(contexts)]
    hub = Hub(table, table, table)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    task = get_task("sql")
    parts = {split: task.examples(split) for split in ("train", "validation", "test")}
    assert sum(len(part) for part in parts.values()) == 800
    assert all(call == ("b-mc2/sql-create-context", {"split": "train"}) for call in hub.calls)
    tables = [{e.prompt.split("\n")[0] for e in part} for part in parts.values()]
    assert not tables[0] & tables[1]
    assert not tables[0] & tables[2]
    assert not tables[1] & tables[2]
    # Twenty of 400 tables are expected in each held-out part; 4 standard deviations are 17.
    assert all(3 <= len(part) <= 37 for part in tables[1:])
    assert held_out_split(contexts[0]) == held_out_split(contexts[400])
    with pytest.raises(DataError, match="found split 'dev'"):
        task.examples("dev")


# --- real data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "split", "rows_found", "groups"),
    [
        ("e2e", "test", 4693, 630),
        ("e2e", "validation", 4672, 547),
        ("sql", "validation", 8229, 8227),
        ("dialogsum", "test", 500, 500),
        ("dialogsum", "validation", 500, 500),
        ("chat", "validation", 386, 386),
    ],
)
def test_real_rows(data_dir: Path, name: str, split: str, rows_found: int, groups: int) -> None:
    task = get_task(name)
    examples, grouped = task.examples(split, data_dir), task.grouped(split, data_dir)
    assert (len(examples), len(grouped)) == (rows_found, groups)
    right = [example.references[-1] for example in grouped[:50]]
    scores = task.score(right, grouped[:50])
    assert tuple(scores) == task.metric_names
    assert scores == dict.fromkeys(task.metric_names, 100.0)
    # Everybody else's answer is worth less.
    assert all(value < 70 for value in task.score(right[::-1], grouped[:50]).values())


def test_real_prompts_of_spec_bench(data_dir: Path) -> None:
    found = get_task("spec_bench").grouped("test", data_dir)
    counts = {kind: sum(example.category == kind for example in found) for kind in CATEGORIES}
    assert counts == dict.fromkeys(CATEGORIES, 80)
    assert all(bool(example.turns) == (example.category == "mt_bench") for example in found)


def test_real_dialogues_have_three_summaries(data_dir: Path) -> None:
    counts = [len(example.references) for example in get_task("dialogsum").grouped("test", data_dir)]
    assert max(counts) == 3
    assert sum(counts) / len(counts) > 2.9  # a few people wrote the same


# --- scores example by example --------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [task for task in TASKS if task.metric_names], ids=lambda task: task.name)
def test_a_score_is_the_mean_over_its_examples(task: Task) -> None:
    examples = [Example("a", " Blue Spice is a pub.", ("Blue Spice is a pub.", "A pub.")), Example("b", " x", ("x y",))]
    texts = ["Blue Spice is a cheap pub.", "x y"]
    each, whole = task.score_each(texts, examples), task.score(texts, examples)
    assert set(each) == set(task.metric_names) == set(whole)
    for name, own in each.items():
        assert len(own) == 2
        assert sum(own) / 2 == pytest.approx(whole[name])
    with pytest.raises(DataError, match="1 predictions and 2 examples"):
        task.score_each(texts[:1], examples)
