"""Read and write every document in a folder, and report where more than its text has changed.

    apt-get source --download-only gettext apt dpkg omegat    # or any other files; unpack them into FOLDER
    python tools/check_documents.py FOLDER [--out bench/results/DATE-documents.md]

Each document is written twice. With its own text, it must be the same file, byte for byte. With a character added to
each unit, it must be the same without that character. The following may differ: targets in files of translations,
where there were none before; the flag of the header of a PO template; line breaks and repeated spaces within a
paragraph; how a character is spelled, such as an entity or a backslash in front of it; and in DOCX, runs of the same
format. Whether the units are the text that a reader of the document sees is not checked.
"""

from __future__ import annotations

import argparse
import html
import io
import re
import sys
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from dragoman.documents.document import MarkedText, Unit  # noqa: E402
from dragoman.documents.formats import find_format, list_suffixes, open_document  # noqa: E402
from dragoman.documents.html import INLINE  # noqa: E402
from dragoman.errors import UserError  # noqa: E402
from dragoman.language_codes import is_same_language  # noqa: E402

MARK = "\ue000"  # a character for private use, which no document has
COLUMNS = ("files", "refused", "units", "same", "different")
# What may appear, or change its spelling, where a text changes.
IGNORED = {
    "po": re.compile(
        r'^msgstr(?:\[\d\])?[^\n]*\n(?:"[^\n]*\n)*|^#,[ ]fuzzy\n(?=msgid ""\n)',
        re.MULTILINE,  # of a template's header
    ),
    "xliff": re.compile(
        r"<target[^>]*/>|<target\b.*?</target>|(?<=<segment)(?: (?:state|subState)=\"[\w:]+\")+", re.DOTALL
    ),
    "html": re.compile('"'),
    "markdown": re.compile(r"[\\>]"),
}
VARIANT = re.compile(r"<tuv\b[^>]*?\blang\s*=\s*[\"']([^\"']*)[\"'][^>]*?(?:/>|>.*?</tuv>)", re.DOTALL)  # of TMX
# What a reader does not see: spaces on its one side may move to the other.
INVISIBLE = {
    "html": re.compile(rf"<!--.*?-->|</?(?!br)(?:{INLINE.pattern})(?=[\s/>])[^<>]*>", re.DOTALL | re.IGNORECASE),
    "markdown": re.compile(r"</?[A-Za-z][^<>]*>|\]\([^()]*\)"),
}
STRUCTURE = re.compile(r"<w:t(?: [^>]*)?>([^<]*)</w:t>|<w:(?:tab|br|p|tbl|tr|tc|drawing|hyperlink|fldChar)[ />]")


def mark(unit: Unit) -> MarkedText:
    """Return the text of a unit with a mark after its first letter."""
    text = unit.text
    first = next((i for i, letter in enumerate(text) if letter.isalpha()), None)
    if first is None:
        return MarkedText(text, unit.markup)
    markup = tuple(tag._replace(position=tag.position + (tag.position > first)) for tag in unit.markup)
    return MarkedText(text[: first + 1] + MARK + text[first + 1 :], markup)


def normalize(data: bytes, name: str, encoding: str, target_language: str) -> list[str]:
    """Return what must not change when the text of a document is replaced, without marks."""
    if name == "docx":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {member: archive.read(member) for member in archive.namelist()}
        return [
            "".join(match[1] or match[0] for match in STRUCTURE.finditer(part.decode())).replace(MARK, "")
            if member.startswith("word/") and member.endswith(".xml")
            else part.hex()
            for member, part in members.items()
        ]
    text = (
        data.decode(encoding).replace(MARK, "").replace(MARK.encode("ascii", "xmlcharrefreplace").decode(), "") + "\n"
    )
    if name == "tmx":
        text = VARIANT.sub(lambda match: "" if is_same_language(match[1], target_language) else match[0], text)
    text = text if name == "text" else html.unescape(text)
    visible = INVISIBLE[name].sub("", text) if name in INVISIBLE else text
    visible = re.sub(r"<[^<>]*>", " ", visible) if name == "html" else visible
    everything, visible = (IGNORED[name].sub("", text) if name in IGNORED else text for text in (text, visible))
    return ["".join(everything.split()), " ".join(visible.split())]


def check_document(path: Path) -> tuple[str, Counter[str], str]:
    """Return the format of a document, its counts, and what is wrong with it."""
    data = path.read_bytes()
    name = find_format(data, path.name).name
    try:
        document = open_document(data, path.name, source_language="en", target_language="")
        unchanged = document.write([MarkedText(unit.text, unit.markup) for unit in document.units])
        marked = document.write([mark(unit) for unit in document.units])
    except UserError as error:
        return name, Counter(files=1, refused=1), f"refused: {error}"
    counts = Counter(files=1, units=len(document.units))
    encoding = document.file.encoding
    language = document.target_language
    before = normalize(data, name, encoding, language)
    problems = []
    if unchanged != data and (
        all(writer.in_place for writer in document.writers) or normalize(unchanged, name, encoding, language) != before
    ):
        problems.append("with its own text")
    encoding = "utf-8" if document.warnings else encoding  # PO files become UTF-8 for a mark
    if normalize(marked, name, encoding, language) != before:
        problems.append("with marks")
    counts["different" if problems else "same"] += 1
    return name, counts, f"different {' and '.join(problems)}" if problems else ""


def make_table(totals: dict[str, Counter[str]], packages: Counter[str]) -> str:
    """Return the counts of each format, and of the documents in each folder, as Markdown."""
    lines = ["# Documents read and written", "", "Made by `python tools/check_documents.py`.", ""]
    names = ", ".join(f"{name} ({count:,})" for name, count in sorted(packages.items()))
    lines += [f"Documents of the source packages {names}.", ""]
    lines += [f"| format | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * len(COLUMNS)]
    lines += [
        f"| {name} | {' | '.join(f'{counts[column]:,}' for column in COLUMNS)} |"
        for name, counts in sorted(totals.items())
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="path of the table")
    arguments = parser.parse_args()
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    packages: Counter[str] = Counter()
    for path in sorted(arguments.folder.rglob("*")):
        if path.suffix.lower() in list_suffixes() and path.is_file():
            name, counts, problem = check_document(path)
            totals[name] += counts
            packages[path.relative_to(arguments.folder).parts[0]] += 1
            if problem:
                print(f"{path}: {problem}")
    table = make_table(totals, packages)
    print(f"\n{table}", end="")
    if arguments.out:
        arguments.out.write_text(table, encoding="utf-8")
    return 1 if any(counts["different"] for counts in totals.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
