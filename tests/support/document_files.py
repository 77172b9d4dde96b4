"""Hypothesis strategies for files of every format of documents, with the file that their translation must give.

A file is a list of parts: what stands in the file, and what stands in the translated one. Both are equal except for
translatable text, so tests can demand every byte.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import strategies as st

from dragoman.documents.document import MarkedText, Unit

Part = tuple[str, str]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHIFTED = str.maketrans(LETTERS + LETTERS.upper(), LETTERS[1:] + "a" + LETTERS.upper()[1:] + "A")


def shift_letters(text: str) -> str:
    """Translate a text: every letter becomes the next one, so tags keep their positions."""
    return text.translate(SHIFTED)


def translate_unit(unit: Unit) -> MarkedText:
    return MarkedText(shift_letters(unit.text), unit.markup)


class GeneratedFile(NamedTuple):
    """A file and its translation."""

    name: str
    data: bytes
    translated: bytes


WORD = st.text(st.sampled_from("abcxyzKQüß日"), min_size=1, max_size=6).map(lambda word: "w" + word)
SENTENCE = st.lists(WORD, min_size=1, max_size=4).map(" ".join)
SPACE = st.sampled_from(["", " ", "\n", "\n\n", "  \t\n"])


def same(text: str) -> list[Part]:
    return [(text, text)]


def changed(text: str) -> list[Part]:
    return [(text, shift_letters(text))]


def filled(before: str, text: str, after: str) -> list[Part]:
    """What only the translated file has."""
    return [("", before + shift_letters(text) + after)]


@st.composite
def inline(draw: st.DrawFn, pairs: list[tuple[str, str]], singles: list[str]) -> list[Part]:
    """Return sentences with nested tags, entities and objects."""
    parts: list[Part] = changed(draw(SENTENCE))
    for _ in range(draw(st.integers(0, 3))):
        parts += same(" ")
        kind = draw(st.integers(0, 3))
        if kind == 0 and pairs:
            opening, closing = draw(st.sampled_from(pairs))
            parts += [*same(opening), *changed(draw(SENTENCE)), *same(closing)]
        elif kind == 1 and singles:
            parts += [*same(draw(st.sampled_from(singles))), *changed(draw(SENTENCE))]
        elif kind == 2 and len(pairs) > 1:
            (outer, outer_end), (inner, inner_end) = draw(st.permutations(pairs))[:2]
            parts += [*same(outer), *changed(draw(SENTENCE)), *same(" " + inner), *changed(draw(SENTENCE))]
            parts += same(inner_end + outer_end)
        else:
            parts += changed(draw(SENTENCE))
    return parts


def finish(parts: list[Part], name: str, encoding: str, newline: str) -> GeneratedFile:
    texts = ["".join(part[side] for part in parts).replace("\n", newline) for side in (0, 1)]
    return GeneratedFile(name, *(text.encode(encoding) for text in texts))


NEWLINES = st.sampled_from(["\n", "\r\n"])
UNICODE = st.sampled_from(["utf-8", "utf-8-sig", "utf-16"])


@st.composite
def html_files(draw: st.DrawFn) -> GeneratedFile:
    encoding = draw(UNICODE)
    parts = same(draw(st.sampled_from(["", "<!DOCTYPE html>\n", "<!-- a < b -->"])))
    parts += same(draw(st.sampled_from(["<html><meta charset=utf-8>", "<HTML>\n<body class='a>b'>"])))
    pairs = [("<b>", "</b>"), ("<a href='x?a=1&amp;b' >", "</a>"), ("<SPAN\nclass=x>", "</SPAN>")]
    singles = ["<img src=x>", "<code>x &lt; y</code>", "&amp;", "&nbsp;", "&eacute;", "<!-- c -->"]
    for _ in range(draw(st.integers(1, 4))):
        block = draw(st.sampled_from(["p", "li", "td", "h1", "DIV"]))
        parts += [*same(draw(SPACE) + f"<{block} id = 'q'>" + draw(SPACE)), *draw(inline(pairs, singles))]
        parts += same(draw(SPACE) + draw(st.sampled_from([f"</{block}>", f"</{block} >\n"])))
        parts += draw(
            st.sampled_from(
                [
                    [],
                    same("<script>if (a<b) 'text'</script>"),
                    same("<pre> code </pre><p translate=no>fixed <b>x</b></p>"),
                    [*same('<img src=y ALT="'), *changed("a picture"), *same('" />')],
                    [*same("<p><a title='"), *changed("help"), *same("'>"), *changed("see"), *same("</a></p>")],
                ]
            )
        )
    return finish(parts, "page.html", encoding, draw(NEWLINES))


# The first line of what contains blocks, and what stands before the lines of these.
CONTAINERS_OF_MARKDOWN = [
    ("> 1", "> "),
    ("1. 2\n", "   "),
    ("-\t3\n", "\t"),
    ("!!! note\n", "    "),
    ("[^1]: 4\n", "    "),
]


@st.composite
def markdown_files(draw: st.DrawFn) -> GeneratedFile:
    parts: list[Part] = []
    pairs = [("**", "**"), ("*", "*"), ("[", "](http://x.org/a_b)"), ("<kbd>", "</kbd>")]
    singles = ["`code_x`", "<http://x.org>", "<https://x.org/a>", "[^1]", "\\#", "&copy;"]
    fixed = [
        "```python\ncode = 1\n```\n", "        indented code\n", "<div>\nfixed\n</div>\n", "[ref]: http://x.org 'T'\n",
        "***\n", "~~~\nx\n\ny\n~~~\n",
    ]  # fmt: skip
    for _ in range(draw(st.integers(1, 4))):
        before, after = draw(
            st.sampled_from([("", "\n"), ("# ", " ##\n"), ("> ", "\n"), ("- ", "\n"), ("3. ", "\n"), ("", "\n===\n")])
        )
        parts += [*same("\n" + before), *draw(inline(pairs, singles)), *same(after + "\n")]
        if draw(st.booleans()):
            parts += same("\n" + draw(st.sampled_from(fixed)) + "\n")
        if draw(st.booleans()):
            parts += [
                *same("\n| "),
                *changed(draw(SENTENCE)),
                *same("  | `a|b` |\n|:--|---|\n|"),
                *changed(draw(SENTENCE)),
            ]
            parts += same("| 12 |\n\n")
    for first, indent in draw(st.lists(st.sampled_from(CONTAINERS_OF_MARKDOWN), max_size=2)):
        parts = [(before.replace("\n", f"\n{indent}"), after.replace("\n", f"\n{indent}")) for before, after in parts]
        parts = same(f"{first}\n{indent}") + parts
    front = same(draw(st.sampled_from(["", "---\ntitle: fixed\n---\n", "+++\na = 'b'\n+++\n"])))
    return finish([*front, *parts], "page.md", draw(UNICODE), draw(NEWLINES))


@st.composite
def srt_files(draw: st.DrawFn) -> GeneratedFile:
    parts: list[Part] = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        parts += same(f"{number}\n00:00:0{number},000 --> 00:00:0{number},900{draw(st.sampled_from(['', ' X1:0']))}\n")
        text = draw(inline([("<i>", "</i>"), ('<font color="red">', "</font>")], ["{\\an8}"]))
        kind = draw(st.integers(0, 2))
        if kind == 0:
            parts += [*text, *same("\n\n")]
        elif kind == 1:
            parts += [*text, *same("\n"), *changed(draw(SENTENCE)), *same("\n\n\n")]
        else:
            parts += [*same("- "), *text, *same("\n- "), *changed(draw(SENTENCE)), *same("\n\n")]
    return finish(parts, "film.srt", draw(UNICODE), draw(NEWLINES))


@st.composite
def text_files(draw: st.DrawFn) -> GeneratedFile:
    parts: list[Part] = []
    for sentence in draw(st.lists(SENTENCE, min_size=1, max_size=5)):
        parts += [*changed(sentence), *same(draw(st.sampled_from(["\n", "\n\n", "  \n", "\n\t"])))]
    return finish(parts, "notes.txt", draw(UNICODE), draw(NEWLINES))


@st.composite
def po_files(draw: st.DrawFn) -> GeneratedFile:
    charset = draw(st.sampled_from(["UTF-8", "utf-8"]))
    header = f'"Language: de\\n"\n"Content-Type: text/plain; charset={charset}\\n"\n'
    parts = same(f'# head\nmsgid ""\nmsgstr ""\n{header}"Plural-Forms: nplurals=2; plural=(n != 1);\\n"\n\n')
    for _ in range(draw(st.integers(1, 4))):
        text = draw(SENTENCE)
        parts += same(
            draw(st.sampled_from(["", "#: a.c:1\n", '#, c-format\nmsgctxt "menu"\n', '#. note\n#| msgid "x"\n']))
        )
        kind = draw(st.integers(0, 4))
        if kind == 0:
            parts += [*same(f'msgid "{text}"\nmsgstr "'), *filled("", text, ""), *same('"\n\n')]
        elif kind == 1:
            parts += [*same(f'msgid "\\"{text}\\" 100"\nmsgstr   "'), *filled('\\"', text, '\\" 100'), *same('"\n')]
        elif kind == 2:
            parts += [*same(f'msgid "one {text}"\nmsgid_plural "{text}"\nmsgstr[0] "'), *filled("", f"one {text}", "")]
            parts += [*same('"\nmsgstr[1] "'), *filled("", text, ""), *same('"\n\n')]
        elif kind == 3:
            parts += same(f'#, fuzzy\nmsgid "{text}"\nmsgstr "old"\n\n#~ msgid "gone"\n#~ msgstr ""\n\n')
        else:
            parts += same(f'msgid "{text}"\nmsgstr "done"\n')
    return finish(parts, "de.po", draw(st.sampled_from(["utf-8", "utf-8-sig"])), draw(NEWLINES))


XML_PAIRS = [('<g id="1">', "</g>"), ("<mrk mtype='x' mid = '2'>", "</mrk>")]
XML_SINGLES = ['<x id="3"/>', "&amp;", "&#233;", '<ph id="4">&lt;br></ph>', "&lt;", "<bpt id='5'>b</bpt>"]


@st.composite
def xliff_files(draw: st.DrawFn) -> GeneratedFile:
    encoding = draw(st.sampled_from(["utf-8", "utf-16"]))
    parts = same(f"<?xml version='1.0' encoding=\"{encoding.upper()}\"?>\n<!-- note -->\n<xliff version='1.2'>")
    parts += same('\n<file original="a" source-language="en"') + same(' target-language="de"><body>')
    for number in range(draw(st.integers(1, 4))):
        content = draw(inline(XML_PAIRS, XML_SINGLES))
        source, target = ("".join(part[side] for part in content) for side in (0, 1))
        state = 'state="needs-review-translation"'
        kind = draw(st.integers(0, 4))
        parts += same(f"\n <trans-unit id=\"{number}\" resname = 'r'>\n  <source>{source}</source>".replace("\\", ""))
        if kind == 0:
            parts += [("", f"\n  <target {state}>{target}</target>")]
        elif kind == 1:
            parts += [("<target/>", f"<target {state}>{target}</target>")]
        elif kind == 2:
            parts += [('<target state="new"></target >', f"<target {state}>{target}</target >")]
            parts += same("<alt-trans><source>other</source><target>x</target></alt-trans>")
        else:
            parts += same("<target state='final'>done</target><note>n</note>")
        parts += same("\n </trans-unit>")
    return finish([*parts, *same("</body></file></xliff>\n")], "a.xlf", encoding, draw(NEWLINES))


@st.composite
def tmx_files(draw: st.DrawFn) -> GeneratedFile:
    encoding = draw(st.sampled_from(["utf-8", "utf-16"]))
    parts = same(f'<?xml version="1.0" encoding="{encoding}"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4">')
    parts += same('<header srclang="en"/>\n<body><tu><tuv xml:lang="en"><seg>a</seg></tuv>')
    parts += same('<tuv xml:lang="de-DE"><seg>b</seg></tuv></tu>')
    for _ in range(draw(st.integers(1, 4))):
        content = draw(
            inline([("<hi>", "</hi>"), ('<bpt i="1">x</bpt>', '<ept i="1">y</ept>')], ["<ph>&lt;br></ph>", "&amp;"])
        )
        source, target = ("".join(part[side] for part in content) for side in (0, 1))
        parts += same(f"\n<tu tuid='1'>\n <tuv xml:lang='en' ><seg>{source}</seg></tuv>")
        kind = draw(st.integers(0, 2))
        if kind == 0:
            parts += [("", f'\n <tuv xml:lang="de-DE"><seg>{target}</seg></tuv>')]
        elif kind == 1:
            parts += [*same("<tuv xml:lang='de'>"), ("<seg/>", f"<seg>{target}</seg>"), *same("</tuv>")]
        else:
            parts += same("<tuv xml:lang='DE'><seg>done</seg></tuv>")
        parts += same("</tu >")
    return finish([*parts, *same("</body></tmx>")], "a.tmx", encoding, draw(NEWLINES))


def pack_docx(document: str, footer: str = "", **others: str) -> bytes:
    """Return a DOCX file with these texts of its XML; the names of others have __ for a slash."""
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        members: dict[str, bytes] = {
            "[Content_Types].xml": b"<Types/>",
            "word/media/a.png": b"\x89PNG\0\xff",
            "word/document.xml": document.encode(),
            "word/footer1.xml": footer.encode(),
            "docProps/app.xml": b"<a/>",
        }
        members |= {f"{name.replace('__', '/')}.xml": text.encode() for name, text in others.items()}
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # without the time of day
    return output.getvalue()


TEXT_BOXES = (
    ("<w:drawing><wps:txbx><w:txbxContent>", "</w:txbxContent></wps:txbx></w:drawing>"),
    ('<w:pict><v:shape id="a"><v:textbox><w:txbxContent>', "</w:txbxContent></v:textbox></v:shape></w:pict>"),
)
CONTAINERS = (
    ('<w:hyperlink r:id="r1">', "</w:hyperlink>"),
    ('<w:ins w:id="2" w:author="A">', "</w:ins>"),
    ("<w:sdt><w:sdtPr/><w:sdtContent>", "</w:sdtContent></w:sdt>"),
)
DELETED = '<w:del w:id="3"><w:r><w:delText>gone</w:delText></w:r></w:del>'


@st.composite
def docx_paragraphs(draw: st.DrawFn, *, boxed: bool = False) -> list[Part]:
    """Return paragraphs and tables, whose paragraphs have runs, links, tracked changes and text boxes."""
    formats = ["", "<w:rPr><w:b/></w:rPr>", "<w:rPr><w:i/><w:u/></w:rPr>"]
    parts: list[Part] = []
    for _ in range(draw(st.integers(1, 2 if boxed else 4))):
        before, after = draw(st.sampled_from([("", ""), ("", "<w:tbl/>"), ("<w:tbl><w:tc>", "</w:tc></w:tbl>")]))
        parts += same(before + '<w:p w:id="1"><w:pPr><w:rPr><w:b/></w:rPr></w:pPr>')
        previous = None
        for _ in range(draw(st.integers(1, 4))):
            previous = draw(st.sampled_from([each for each in formats if each != previous]))
            start = f'<w:r>{previous}<w:t xml:space="preserve">'
            run = [*same(start), *changed(draw(SENTENCE)), *same("</w:t></w:r>")]
            kinds = ["run", "run", "container", "deleted", "text box", "both"]
            kind = draw(st.sampled_from(kinds[: 4 if boxed else 6]))
            if kind == "container":
                opening, closing = draw(st.sampled_from(CONTAINERS))
                run = [*same(opening), *run, *same(closing)]
            elif kind == "deleted":
                run = same(DELETED)
            elif kind != "run":
                content = draw(docx_paragraphs(boxed=True))
                (drawing, end), (picture, picture_end) = TEXT_BOXES
                if kind == "both":  # a program reads one of the two
                    drawing, end = f"<mc:AlternateContent><mc:Choice>{drawing}", f"{end}</mc:Choice><mc:Fallback>"
                    content = [*content, *same(end + picture), *content]
                    end = f"{picture_end}</mc:Fallback></mc:AlternateContent>"
                run = [*same(f"<w:r>{previous}{drawing}"), *content, *same(f"{end}</w:r>")]
            previous = previous if kind == "run" else None
            parts += run
        parts += same(f"</w:p>{after}")
    return parts


@st.composite
def docx_files(draw: st.DrawFn) -> GeneratedFile:
    names = "".join(f' xmlns:{name}="urn:{name}"' for name in ("w", "r", "v", "mc", "wps"))
    parts = same(f'<?xml version="1.0" encoding="UTF-8"?>\n<w:document{names}><w:body>')
    parts += draw(docx_paragraphs())
    footer = '<w:ftr xmlns:w="urn:w"><w:p><w:r><w:t xml:space="preserve">{}</w:t></w:r></w:p></w:ftr>'
    texts = ["".join(part[side] for part in parts) + "</w:body></w:document>" for side in (0, 1)]
    word = draw(WORD)
    files = [
        pack_docx(text, footer.format(each)) for text, each in zip(texts, (word, shift_letters(word)), strict=True)
    ]
    return GeneratedFile("a.docx", *files)


GENERATORS: dict[str, Callable[[], st.SearchStrategy[GeneratedFile]]] = {
    "docx": docx_files,
    "xliff": xliff_files,
    "tmx": tmx_files,
    "po": po_files,
    "srt": srt_files,
    "html": html_files,
    "markdown": markdown_files,
    "text": text_files,
}
