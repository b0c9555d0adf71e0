"""Reading text: kinds of files, broken rows, special tokens; conversion and training read alike."""

import bz2
import gzip
import json
import lzma

import pytest
from datasets import Dataset
from test_conversion import TEXT, error_of, tokenizer  # noqa: F401
from tokenizers.processors import TemplateProcessing

from conversion.text import DataError, read_tokens, rendered_tokens
from training.data import as_batch, marks_answers, packed_rows


ROWS = [{"text": f"document {i}. {TEXT[:100]}"} for i in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TEXTS = "\n".join(row["text"] for row in ROWS)
CSV = "text\n" + "".join(f'"{row["text"]}"\n' for row in ROWS)
FILES = {
    "a.jsonl": LINES,
    "A.JSONL": LINES,
    "a.ndjson": "\ufeff" + LINES.replace("\n", "\n\n"),
    "lines.json": LINES,
    "array.json": json.dumps(ROWS, indent=1),
    "a.csv": CSV,
    "a.v2.jsonl.gz": LINES,
    "A.JSONL.GZ": LINES,
    "a.ndjson.bz2": LINES,
    "a.json.xz": LINES,
    "a.csv.gz": CSV,
    "a.txt": TEXTS,
    "A.TXT.gz": TEXTS,
    "a.Md": TEXTS,
}


def write_file(path, content):
    data = content if isinstance(content, bytes) else content.encode()
    for suffix, compress in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        data = compress(data) if path.suffix.lower() == suffix else data
    path.write_bytes(data)
    return str(path)


def readers(name, tokenizer):  # noqa: F811
    """The first rows of 32 tokens of a source, as conversion reads it, and training, prepared and streamed."""
    yield lambda: read_tokens([name], tokenizer, None, 32)[:5]
    yield lambda: as_batch(list(packed_rows([name], tokenizer, 32))[:5])["input_ids"]
    yield lambda: as_batch(list(packed_rows([name], tokenizer, 32, streaming=True))[:5])["input_ids"]


@pytest.mark.parametrize("file", FILES)
def test_every_kind_of_file_is_read_as_what_it_is(tokenizer, tmp_path, file):  # noqa: F811
    expected = []
    for text in [TEXTS] if FILES[file] == TEXTS else [row["text"] for row in ROWS]:
        expected += [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    for read in readers(write_file(tmp_path / file, FILES[file]), tokenizer):
        assert read().flatten().tolist() == expected[:160]


def test_parquet(tokenizer, tmp_path):  # noqa: F811
    name = str(tmp_path / "a.PARQUET")
    Dataset.from_list([{"id": i} | row for i, row in enumerate(ROWS)]).to_parquet(name)
    rows = [read() for read in readers(name, tokenizer)]
    assert rows[0].tolist() == rows[1].tolist() == rows[2].tolist()
    assert tokenizer.decode(rows[0][0]).startswith("document 0.")


@pytest.mark.parametrize("file", ["a.tsv", "a.docx", "a.zip", "corpus", "a.gz", "a.text.gz", "a.jsonl.tmp"])
def test_files_of_unknown_kind_are_refused(tokenizer, tmp_path, file):  # noqa: F811
    name = write_file(tmp_path / file, LINES)
    for read in readers(name, tokenizer):
        with pytest.raises(DataError, match="unknown kind") as info:
            read()
        assert name in str(info.value) and ".ndjson" in str(info.value)


CHAT = [{"role": "user", "content": "x"}]
BROKEN = {
    "null text": '{"text": null}',
    "number as text": '{"text": 5}',
    "null chat": '{"messages": null}',
    "chat without rows": '{"messages": []}',
    "chat of null": '{"messages": [null]}',
    "chat of text": '{"messages": "user: x"}',
    "number": "5",
    "null": "null",
    "list": "[1]",
    "not JSON": '{"text": ',
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "lone surrogate": '{"text": "\\ud800"}',
    "other columns": '{"body": "x"}',
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("file", ["a.jsonl", "a.json", "a.ndjson.gz"])
def test_a_broken_row_is_named_with_its_file(tokenizer, tmp_path, kind, file):  # noqa: F811
    row = BROKEN[kind] if isinstance(BROKEN[kind], bytes) else BROKEN[kind].encode()
    few = "".join(json.dumps(row) + "\n" for row in ROWS[:3]).encode()
    name = write_file(tmp_path / file, few + row + b"\n" + few)
    for read in readers(name, tokenizer):
        with pytest.raises(DataError) as info:
            read()
        assert f"{name!r}, row 4" in str(info.value) and len(str(info.value).splitlines()) == 1


def test_a_directory_is_its_training_files_of_known_kinds(tokenizer, tmp_path):  # noqa: F811
    for folder in ("one", "split", "none"):
        (tmp_path / folder).mkdir()
    for file, content in {"a.jsonl": LINES, "b.ndjson.gz": LINES, "README.md": "# Read", "x.png": b"\x89PNG"}.items():
        write_file(tmp_path / "one" / file, content)
    for file, content in {"train.jsonl": LINES, "test.jsonl": '{"text": null}\n'}.items():
        write_file(tmp_path / "split" / file, content)
    expected = read_tokens([write_file(tmp_path / "a.jsonl", LINES)], tokenizer, None, 32)
    for read in readers(str(tmp_path / "one"), tokenizer):
        assert read().tolist() == expected[:5].tolist()
    for read in readers(str(tmp_path / "split"), tokenizer):
        assert read().tolist() == expected[:5].tolist()
    write_file(tmp_path / "none" / "x.png", b"\x89PNG")
    with pytest.raises(DataError, match="no files of a known kind"):
        read_tokens([tmp_path / "none"], tokenizer, 1, 32)


def test_a_broken_row_of_other_kinds_is_named(tokenizer, tmp_path):  # noqa: F811
    parquet = str(tmp_path / "a.parquet")
    Dataset.from_list([{"text": "x"}, {"text": None}]).to_parquet(parquet)
    csv = write_file(tmp_path / "a.csv", "text,id\nx,1\n,2\n")
    wide = write_file(tmp_path / "wide.csv", "text,id\nx,1\ny,1,2,3\n")
    damaged = write_file(tmp_path / "damaged.parquet", "PAR1")
    broken = write_file(tmp_path / "a.txt", b"one\ntwo \xff\n")
    (tmp_path / "folder").mkdir()
    write_file(tmp_path / "folder" / "a.jsonl", LINES)
    write_file(tmp_path / "folder" / "b.jsonl.gz", '{"text": "x"}\nnull\n')
    truncated = tmp_path / "a.jsonl.gz"
    truncated.write_bytes(gzip.compress(LINES.encode())[:40])
    for name, where in (
        (parquet, ", row 2"), (csv, ", row 2"), (wide, "line 3"), (damaged, "cannot be read"),
        (broken, ", line 2: not UTF-8"), (str(tmp_path / "folder"), "b.jsonl.gz', row 2"),
        (str(truncated), "cannot be read"),
    ):  # fmt: skip
        for read in readers(name, tokenizer):
            with pytest.raises(DataError) as info:
                read()
            message = str(info.value)
            assert name in message and where in message and len(message.splitlines()) == 1


def test_a_chat_that_its_template_refuses_is_named(tokenizer, tmp_path):  # noqa: F811
    name = write_file(tmp_path / "a.jsonl", json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT * 2}))
    before, tokenizer.chat_template = tokenizer.chat_template, (
        "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}x"
    )  # fmt: skip
    try:
        for read in readers(name, tokenizer):
            with pytest.raises(DataError, match="row 2: roles must alternate"):
                read()
    finally:
        tokenizer.chat_template = before


def test_a_broken_row_ends_the_command_with_one_line(tokenizer, tmp_path, capsys):  # noqa: F811
    from test_conversion import make_base

    make_base(tokenizer, tmp_path / "base")
    name = write_file(tmp_path / "a.jsonl", LINES + "null\n")
    message = error_of(capsys, [tmp_path / "base", "--output", tmp_path / "hla", "--data", name])
    assert message.splitlines()[-1].startswith(f"error: {name!r}, row 41: ")
    assert not (tmp_path / "hla").exists()


def test_rendered_text_gets_no_second_set_of_special_tokens(tokenizer, tmp_path):  # noqa: F811
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    try:
        assert tokenizer("x").input_ids[0] == bos
        name = write_file(tmp_path / "a.jsonl", "".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(30)))
        one = tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False).input_ids
        assert one[0] == bos != one[1] and rendered_tokens(CHAT, tokenizer)["input_ids"] == one
        for read in readers(name, tokenizer):
            assert read().flatten().tolist() == (one * 30)[:160]
        plain = write_file(tmp_path / "b.jsonl", LINES)
        for read in readers(plain, tokenizer):
            assert read()[0, :2].tolist() == [bos, tokenizer("document", add_special_tokens=False).input_ids[0]]
    finally:
        tokenizer.backend_tokenizer.post_processor = None


def test_any_spelling_of_the_mark_of_an_answer_is_seen():
    block = "{{%{0}generation{1}%}}x{{%{0}endgeneration{1}%}}"
    for before, after in (("", ""), (" ", " "), ("- ", " -"), ("-", "-"), ("+ ", " +"), ("\n  ", "\n"), ("-\t", "")):
        assert marks_answers(block.format(before, after)), (before, after)
    for template in (
        "{{ generation }}", "{# {% generation %} #}", "{% if add_generation_prompt %}x{% endif %}", "{% generations %}",
        "{% set generation = 1 %}", "{% raw %}{% generation %}{% endraw %}", "generation",
    ):  # fmt: skip
        assert not marks_answers(template), template
