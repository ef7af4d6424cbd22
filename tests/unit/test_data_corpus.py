"""Documents out of files, and the sentence for every way a file can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data import corpus
from meshwright.data.corpus import Document, ReadOptions, read_documents
from meshwright.data.files import expand
from meshwright.errors import DataError, InputError


def texts(path: Path, options: ReadOptions | None = None) -> list[str]:
    return [document.text for document in read_documents(path, options or ReadOptions())]


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_plain_text_is_one_document_unless_the_separator_stands_in_it(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "one.txt", "a\n\nb\n")) == ["a\n\nb"]
    assert texts(write(tmp_path / "two.txt", "a\nb\n\f\nc\n")) == ["a\nb", "c"]
    assert texts(write(tmp_path / "own.txt", "a<|x|>b<|x|>c"), ReadOptions(separator="<|x|>")) == ["a", "b", "c"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    pieces=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n|"), max_size=9), min_size=1, max_size=6
    ),
    separator=st.sampled_from(["\f", "<|>", "||", "é|é"]),
    block=st.integers(1, 7),
)
def test_blocks_may_end_inside_a_character_or_a_separator(
    pieces: list[str], separator: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "BLOCK_BYTES", block)
    joined = separator.join(pieces)
    path = write(tmp_path / "blocks.txt", joined)
    if joined:
        assert texts(path, ReadOptions(separator=separator)) == joined.split(separator)


def test_jsonl_gives_text_and_prompt(tmp_path: Path) -> None:
    lines = [{"text": "answer", "prompt": "question"}, {"prompt": "q2", "text": "a2", "more": 1}]
    path = write(tmp_path / "set.jsonl", "\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert list(read_documents(path, ReadOptions(prompt_field="prompt"))) == [
        Document("answer", "question"),
        Document("a2", "q2"),
    ]
    assert texts(path) == ["answer", "a2"]


def test_parquet_gives_the_same_as_jsonl(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "set.parquet"
    parquet.write_table(arrow.table({"text": ["a", "b"], "prompt": ["p", "q"], "number": [1, 2]}), path)
    assert list(read_documents(path, ReadOptions(prompt_field="prompt"))) == [Document("a", "p"), Document("b", "q")]
    with pytest.raises(DataError, match=r"no column 'body'; its columns are text, prompt, number"):
        texts(path, ReadOptions(text_field="body"))
    with pytest.raises(DataError, match=r"column 'number' has the type int64; it must be string"):
        texts(path, ReadOptions(text_field="number"))
    cut = write(tmp_path / "cut.parquet", path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut.parquet' is not a whole Parquet file"):
        texts(cut)
    parquet.write_table(arrow.table({"text": ["a", None]}), path)
    with pytest.raises(DataError, match=r"row 1 field 'text' is a JSON null; it must be a string"):
        texts(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", r"empty.txt' is empty \(0 bytes\)"),
        ("latin.txt", b"t\xc3\xa9 \xe9 x", r"latin.txt' is not UTF-8 at byte 4"),
        ("cut.txt", b"th\xc3", r"cut.txt' is not UTF-8 at byte 2"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"bad.jsonl' line 2 column 1[0-9] is not JSON"),
        ("cut.jsonl", b'{"text": "a"}\n{"text": "b', r"line 2 column 10 .* may be cut short"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"line 2 is not UTF-8 at byte 24 of the file"),
        ("list.jsonl", b"[1]\n", r"line 1 is a JSON array; each line must be one JSON object"),
        ("none.jsonl", b'{"body": "a"}\n', r"line 1 has no field 'text' \(data.text_field\); its fields are 'body'"),
        ("type.jsonl", b'{"text": 3}\n', r"line 1 field 'text' is a JSON number; it must be a string"),
        ("half.jsonl", b'{"text": "a\\ud800"}\n', r"line 1 field 'text' has half of a surrogate pair at character 1"),
        ("deep.jsonl", b"[" * 100_000 + b"\n", r"line 1 .*(nested|not JSON)"),
    ],
)
def test_what_is_wrong_is_named_with_its_position(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as caught:
        texts(path)
    assert "\n" not in str(caught.value)


def test_the_position_of_a_bad_byte_counts_from_the_start_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 4)
    path = write(tmp_path / "late.txt", "ééé".encode() + b"ab\xc3(")
    with pytest.raises(DataError, match="at byte 8"):
        texts(path)


def test_missing_files_patterns_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing.txt' does not exist"):
        expand(str(tmp_path / "missing.txt"))
    with pytest.raises(DataError, match="is a folder"):
        expand([tmp_path])
    with pytest.raises(DataError, match="no file matches"):
        expand(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="list of data files is empty"):
        expand([])
    for name in ("b.txt", "a.txt"):
        write(tmp_path / name, "x")
    assert [path.name for path in expand(str(tmp_path / "*.txt"))] == ["a.txt", "b.txt"]
    with pytest.raises(InputError, match=r"suffix '.docx'; use one of"):
        read_documents(write(tmp_path / "a.docx", "x"), ReadOptions())


def test_the_data_room_imports_no_optional_package_and_torch_for_batches_alone() -> None:
    program = (
        "import sys, meshwright.data.corpora; early = 'torch' in sys.modules; import meshwright.data.loader; "
        "sys.exit(early or any(name in sys.modules for name in ('tokenizers', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
