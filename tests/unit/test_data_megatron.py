"""Megatron's token files, against bytes written out by hand from the documented format."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data.megatron import read_megatron, write_megatron
from meshwright.errors import DataError, InputError

# three documents of 2, 1 and 3 tokens, uint16
GOLDEN_BIN = bytes.fromhex("0100 0200 0300 ffff 0500 0600")
GOLDEN_IDX = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX\0\0
    "0100000000000000"  # version 1
    "08"  # uint16
    "0300000000000000"  # three sequences
    "0400000000000000"  # four document entries
    "02000000 01000000 03000000"  # lengths in tokens
    "0000000000000000 0400000000000000 0600000000000000"  # begins in bytes
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000"  # document index
)
GOLDEN_DOCUMENTS = [[1, 2], [3], [65535, 5, 6]]


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    (tmp_path / "set.bin").write_bytes(GOLDEN_BIN)
    (tmp_path / "set.idx").write_bytes(GOLDEN_IDX)
    return tmp_path / "set.bin"


def documents_of(path: Path) -> list[list[int]]:
    store = read_megatron(path)
    return [store.tokens[begin:end].tolist() for begin, end in store.spans.tolist()]


def test_the_golden_bytes_are_read(golden: Path) -> None:
    assert documents_of(golden) == GOLDEN_DOCUMENTS
    assert documents_of(golden.with_suffix(".idx")) == GOLDEN_DOCUMENTS
    assert read_megatron(golden).size == 65536


def test_the_golden_bytes_are_written(tmp_path: Path) -> None:
    write_megatron(tmp_path / "own.bin", [np.array(ids) for ids in GOLDEN_DOCUMENTS], "uint16")
    assert (tmp_path / "own.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "own.idx").read_bytes() == GOLDEN_IDX
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["own.bin", "own.idx"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(0, 127), max_size=6), min_size=1, max_size=8).filter(any),
    dtype=st.sampled_from(["uint8", "int8", "int16", "int32", "int64", "uint16"]),
)
def test_round_trip(documents: list[list[int]], dtype: str, tmp_path: Path) -> None:
    write_megatron(tmp_path / "set", [np.array(ids, np.int64) for ids in documents], dtype)
    store = read_megatron(tmp_path / "set.bin")
    assert documents_of(tmp_path / "set.bin") == [ids for ids in documents if ids]
    assert store.empty_documents == sum(not ids for ids in documents)
    assert store.size == 1 + max(max(ids) for ids in documents if ids)


def test_a_document_of_several_sequences_is_one(golden: Path) -> None:
    index = bytearray(GOLDEN_IDX)
    struct.pack_into("<Q", index, 26, 3)
    end = len(index) - 32
    index[end:] = struct.pack("<3q", 0, 1, 3)
    golden.with_suffix(".idx").write_bytes(index)
    assert documents_of(golden) == [[1, 2], [3, 65535, 5, 6]]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda b: b"", r"set.idx' is empty"),
        (lambda b: b"PK\x03\x04" + b[4:], r"does not begin with the bytes b'MMIDIDX\\x00\\x00'"),
        (lambda b: b[:20], r"ends at byte 20, inside the header of 34 bytes"),
        (lambda b: b[:9] + b"\x02" + b[10:], r"version 2 at byte 9"),
        (lambda b: b[:17] + b"\x07" + b[18:], r"type code 7 at byte 17; use one of 1 \(uint8\)"),
        (lambda b: b[:-1], r"ends at byte 101, but 3 sequences and 4 entries need 102"),
        (lambda b: b[:70] + b"\x01" + b[71:], r"document index at byte 70 that does not rise"),
        (lambda b: b[:86] + b"\x00" + b[87:], r"document index at byte 86 that does not rise"),
        (lambda b: b[:34] + b"\x09" + b[35:], r"sequence 0 of .* is 9 tokens at byte 0; the .bin is cut short"),
        (lambda b: b[:54] + b"\x05" + b[55:], r"sequence 1 of .* at byte 5"),
    ],
)
def test_a_malformed_index_is_named_with_its_byte(golden: Path, edit: object, message: str) -> None:
    golden.with_suffix(".idx").write_bytes(edit(GOLDEN_IDX))  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        read_megatron(golden)


def test_a_malformed_bin_is_named(golden: Path) -> None:
    golden.write_bytes(GOLDEN_BIN[:-1])
    with pytest.raises(DataError, match=r"has 11 bytes, not a multiple of the 2"):
        read_megatron(golden)
    golden.write_bytes(GOLDEN_BIN[:-2])
    with pytest.raises(
        DataError, match=r"has 10 bytes but sequence 2 of .* is 3 tokens at byte 6; the .bin is cut short"
    ):
        read_megatron(golden)
    golden.unlink()
    with pytest.raises(DataError, match=r"set.bin' does not exist"):
        read_megatron(golden)


def test_negative_ids_are_named_with_their_byte(tmp_path: Path) -> None:
    write_megatron(tmp_path / "set", [np.array([1, 2, -3])], "int32")
    with pytest.raises(DataError, match=r"has the id -3 at byte 8; ids start at 0"):
        read_megatron(tmp_path / "set.bin")


def test_ids_that_do_not_fit_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ids from 1 to 65536, but uint16 holds 0 to 65535"):
        write_megatron(tmp_path / "set", [np.array([1, 65536])])
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"token type 'uint32' is unknown"):
        write_megatron(tmp_path / "set", [np.array([1])], "uint32")
