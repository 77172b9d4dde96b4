"""Every format: a translation changes the translated text and nothing else."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from document_files import GENERATORS, GeneratedFile, translate_unit
from dragoman.documents.document import Document, MarkedText
from dragoman.documents.formats import FORMATS, find_format, open_document
from dragoman.errors import UserError


def open_generated(file: GeneratedFile) -> Document:
    return open_document(file.data, file.name)


MARKS = st.text(st.sampled_from("<>&;\"'`*_[]()#-|\n\\ a!/=1:,"), max_size=80)


def list_in_place(document: Document) -> list[MarkedText | None]:
    """Return the sources as translations, where translations replace them."""
    return [unit.content if slot.in_place else None for unit, slot in zip(document.units, document.slots, strict=True)]


def read_members(data: bytes) -> list[tuple[object, ...]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [
            (m.filename, m.date_time, m.external_attr, m.compress_type, archive.read(m)) for m in archive.infolist()
        ]


def test_every_format_is_generated() -> None:
    assert set(GENERATORS) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_identity(name: str) -> None:
    @settings(max_examples=200)
    @given(GENERATORS[name]())
    def check(file: GeneratedFile) -> None:
        document = open_generated(file)
        assert document.write([None] * len(document.units)) == file.data
        assert document.write(list_in_place(document)) == file.data
        assert find_format(file.data, file.name) is FORMATS[name]

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_everything_but_the_text_keeps_its_bytes(name: str) -> None:
    @settings(max_examples=200)
    @given(GENERATORS[name]())
    def check(file: GeneratedFile) -> None:
        document = open_generated(file)
        translated = document.write([translate_unit(unit) for unit in document.units])
        if name == "docx":
            assert read_members(translated) == read_members(file.translated)
        else:
            assert translated == file.translated

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_read_or_refused(name: str) -> None:
    """A truncated or altered file gives a UserError, or a document that writes itself."""

    @settings(max_examples=100)
    @given(GENERATORS[name](), st.data())
    def check(file: GeneratedFile, data: st.DataObject) -> None:
        damaged = bytearray(file.data)
        position = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            del damaged[position:]
        else:
            damaged[position] = data.draw(st.integers(0, 255))
        try:
            document = open_document(bytes(damaged), file.name)
            document.write([translate_unit(unit) for unit in document.units])
        except UserError:
            pass

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_are_read_or_refused(name: str) -> None:
    @settings(max_examples=100)
    @given(
        st.binary(max_size=200) | st.text(st.sampled_from("<>&;\"'`*_[]()#-|\n\\ a!/=1:,"), max_size=80).map(str.encode)
    )
    def check(data: bytes) -> None:
        try:
            document = open_document(data, f"x{FORMATS[name].suffixes[0]}")
            assert document.write(list_in_place(document)) == data
            document.write([translate_unit(unit) for unit in document.units])
        except UserError:
            pass

    check()
