"""Markdown as CommonMark reads it: emphasis, links, HTML and definitions of references."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.documents.document import Document, MarkedText, Unit
from dragoman.documents.formats import open_document
from dragoman.documents.markdown import BLOCK_WARNING, JOINED_WARNING

MARKER = "\ue000"  # no file has it
KEPT = str.maketrans("", "", "\\> \t\r\n")  # leaves what stays the same where a unit is written anew


def open_markdown(text: str) -> Document:
    return open_document(text.encode(), "a.md")


def show(unit: Unit) -> str:
    """Return a text with its pairs of tags as <raw:...> and other tags as <raw>."""
    pieces, position = [], 0
    for tag in unit.markup:
        pieces += [unit.text[position : tag.position], {"open": f"<{tag.raw}:", "close": ">"}.get(tag.kind, tag.raw)]
        position = tag.position
    return "".join([*pieces, unit.text[position:]])


def write_marked(document: Document) -> str:
    """Return the file with a marker before each unit, without these markers, so that every unit is written anew."""
    marked = [
        MarkedText(MARKER + unit.text, tuple(tag._replace(position=tag.position + 1) for tag in unit.markup))
        for unit in document.units
    ]
    return document.write(marked).decode().replace(MARKER, "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Hello ***both* strong** and *a **b*** x", "Hello <**:<*:both> strong> and <*:a <**:b>> x"),
        ("***a** b*", "<*:<**:a> b>"),
        ("***a***", "<*:<**:a>>"),
        ("**a **b** c**", "<**:a <**:b> c>"),
        ("*a**b*", "<*:a**b>"),
        ("*a**b**c*", "<*:a<**:b>c>"),
        ("a***b***c", "a<*:<**:b>>c"),
        ("a******b*********c", "a<**:<**:<**:b>>>***c"),
        ("**a*", "*<*:a>"),
        ("*a**", "<*:a>*"),
        ("__a_", "_<_:a>"),
        ("*a _b* c_", "<*:a _b> c_"),
        ("**a *b** c", "*<*:a <*:b>> c"),
        ("a * b * c", "a * b * c"),
        ('a*"b"*', 'a*"b"*'),
        ("*(*a*)*", "<*:(<*:a>)>"),
        ("a*b*c", "a<*:b>c"),
        ("a_b_c", "a_b_c"),
        ("_a_b_c_", "<_:a_b_c>"),
        ("a-_(b)_", "a-<_:(b)>"),
        ("\\**a*", "*<*:a>"),
        ("~~a *b*~~ ~~~c~~~ d", "<~~:a <*:b>> ~~~c~~~ d"),
        ("ba [del] **[fo** gri](u) ra.", "ba [del] **<[:fo** gri> ra."),
        ("*a [b* c](u)", "*a <[:b* c>"),
        ("*a [b* c] d", "<*:a [b> c] d"),
        ("*a ![*b* c](u)*", "<*:a <![:<*:b> c>>"),
        ("*a `b*` c", "*a `b*` c"),
    ],
)
def test_delimiters_pair_as_in_commonmark(text: str, shown: str) -> None:
    document = open_markdown(text)
    assert [show(unit) for unit in document.units] == [shown]
    assert write_marked(document) == text


def test_a_reference_hides_its_emphasis() -> None:
    """It is a name, so what stands in it pairs with nothing."""
    [unit] = open_markdown("*a [b* c]\n\n[b* c]: x\n").units
    assert show(unit) == "*a [b* c]"


@pytest.mark.parametrize("text", ["a **b** <i>c</i> d", "<b>a <i>b</i> <b>c</b></b>"])
def test_pairs_of_html_are_pairs(text: str) -> None:
    [unit] = open_markdown(f"x {text}").units
    assert all(tag.partner is not None for tag in unit.markup)


def test_pairs_that_overlap_keep_their_partners() -> None:
    """So they are known to be pairs, and placing them gives a warning."""
    [unit] = open_markdown("x *a <b>b* c</b> d").units
    assert [(tag.raw, tag.partner) for tag in unit.markup] == [("*", 2), ("<b>", 3), ("*", 0), ("</b>", 1)]


PIECES = [
    *"*_~`[]()<>!\\|#-+=:.'\" \n\t", "**", "__", "~~", "***", "a", "b c", "é", "[a]: b\n", "[a]", "](u)", '"t"',
    "<b>", "</b>", "<b c='>'>", '<i\nd="">', "<?p ?>", "<!-- x -->", "<!X", "<![CDATA[", "]]>", "?>", "&copy;",
    "\n\n", "\n> ", "\n- ", "\n1. ", "\n    ", "  \n", "\r\n", "```\n", "http://x.y",
]  # fmt: skip


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_markdown_keeps_what_is_no_text(text: str) -> None:
    """Units that are written anew change white space in them, the marks of quotes, and backslashes."""
    document = open_markdown(text)
    assert document.write([unit.content for unit in document.units]).decode() == text
    assert write_marked(document).translate(KEPT) == text.translate(KEPT)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('ba <span title="a > b">del</span> fo.', 'ba <<span title="a > b">:del> fo.'),
        ("ba <span title='a > \"b'>del</span> fo.", "ba <<span title='a > \"b'>:del> fo."),
        ('ba <span\n title="a >\n b"\n id=c>del</span> fo.', 'ba <<span\n title="a >\n b"\n id=c>:del> fo.'),
        ("ba <span title='a > b\"> del", "ba <span title='a > b\"> del"),
        ("ba <a <b>del</b>", "ba <a <<b>:del>"),
        ("ba <?php 1 > 0 ?> del", "ba <?php 1 > 0 ?> del"),
        ("ba <![CDATA[<*a* > 0]]> del", "ba <![CDATA[<*a* > 0]]> del"),
        ("ba <!X *a* b> *del*", "ba <!X *a* b> <*:del>"),
    ],
)
def test_html_ends_outside_of_quotes(text: str, shown: str) -> None:
    [unit] = open_markdown(text).units
    assert show(unit) == shown


@pytest.mark.parametrize("indent", ["> ", "      ", "   > "])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_tags_over_several_lines_keep_their_bytes(indent: str, newline: str) -> None:
    lines = ["> ba" if ">" in indent else "ba", "b <span", '  title="x', 'y">del</span> [fo', "  gri](u", '  "v") ra']
    text = f"{newline}{indent}".join(lines)
    document = open_markdown(text)
    [unit] = document.units
    assert [tag.partner for tag in unit.markup] == [1, 0, 3, 2]
    start = text.index("<span")
    assert unit.markup[0].raw == text[start : text.index("del")]
    assert unit.markup[3].raw == text[text.index("](u") : text.index(" ra")]
    assert text[start:] in write_marked(document).replace(" gri]", f"{newline}{indent}  gri]")
    assert not document.warnings


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("<?php\necho 1 > 0;\n\necho b;\n?>\n\nc\n", ["c"]),
        ("<?php echo 1; ?>\nc\n", ["c"]),
        ("a\n<?php\n\necho b;\n?>\nc\n", ["a", "c"]),
        ("<!DOCTYPE a\n\nb>\nc\n", ["c"]),
        ("<!a b>\nc\n", ["c"]),
        ("<![CDATA[\na > b\n\n]>\n]]>\nc\n", ["c"]),
        ("<!-->\nc\n", ["c"]),
        ("<! a\n\nc\n", ["<! a", "c"]),
        ("<![cdata[ a\n\nc\n", ["<![cdata[ a", "c"]),
        ("a\n<![cdata[ b\nc\n", ["a <![cdata[ b c"]),
        ("> <?php\n> a\n>\n> b\n> ?>\n> c\n", ["c"]),
        ("> <?php\n> a\n\nc\n", ["c"]),
        ("> <!-- a\nc\n", ["c"]),
        ("> <div>\n> a\nc\n", ["c"]),
        ("- <?php\n\n  a ?>\n- c\n", ["c"]),
        ("<PRE>\na\n\nb</Pre>\nc\n", ["c"]),
        ("<?php\n\na\n", []),
    ],
)
def test_html_blocks_end_as_in_commonmark(text: str, units: list[str]) -> None:
    document = open_markdown(text)
    assert [unit.text for unit in document.units] == units
    assert write_marked(document).split() == text.split()


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ('[a]: http://x\n  "del fo"\nba [a] fo\n', ["ba  fo"]),
        ('[a]: http://x\n"del fo"\n\nba [a] fo\n', ["ba  fo"]),
        ("ba [a] fo\n\n[a]: http://x\n\n  'del fo'\n", ["ba  fo", "'del fo'"]),
        ('[a]:\n  http://x\n        "del\nfo\n ba"\nba [a] fo\n', ["ba  fo"]),
        ("[a]:\nb\n(del \\) fo)  \n[c\nd]: <> 'x'\nba [a] [c d] fo\n", ["ba   fo"]),
        ("> [a]: b\n> 'del\nfo'\n> ba [a]\n", ["ba "]),
        ("- [a]: b\n  'del'\n  ba [a]\n", ["ba "]),
        ("[a]: b\n'del\n\nfo' [a]\n", ["'del", "fo' "]),
        ("[a]: b\n'del' fo [a]\n", ["'del' fo "]),
        ("[a]: b\n===\n[a] ba\n---\n", [" ba"]),
        ("[a]: b 'del' fo\n[a]\n", ["[a]: b 'del' fo [a]"]),
        ("[a]: b'del'\n[a] fo\n", [" fo"]),
        ("[a]: <b>'del'\n[a]\n", ["[a]: 'del' [a]"]),
        ("[a]: b c\n[a]\n", ["[a]: b c [a]"]),
        ("[a]: (b\n[a]\n", ["[a]: (b [a]"]),
        ("[a]:\n\n[a]\n", ["[a]:", "[a]"]),
        ("[ ]: b\n", ["[ ]: b"]),
        ("[a\\]: b\n", ["[a]: b"]),
        ("ba\n[a]: b\n\n[a]\n", ["ba [a]: b", "[a]"]),
        ("# [a]: b\n[a]\n", ["[a]: b", "[a]"]),
        ("```\n[a]: b\n```\n[a]\n", ["[a]"]),
        ("[a\\]b]: c\n[a\\]b] fo\n", [" fo"]),
        ("[a]: x_(y_(z))\n[b]: {{ site.url }}/x 'T'\n[a] [b] fo\n", ["  fo"]),
        ("[//]: # (del fo)\n[c]: <> (del)\nba\n", ["ba"]),
    ],
)
def test_definitions_are_those_of_commonmark(text: str, units: list[str]) -> None:
    document = open_markdown(text)
    assert [unit.text for unit in document.units] == units
    assert write_marked(document).translate(KEPT) == text.translate(KEPT)


@pytest.mark.parametrize(
    ("text", "translation", "positions", "expected", "warned"),
    [
        ("a `b` c `d` e", "C a", (0, 0), "`b` `d`C a", False),
        ("a ``b`` c ` d ` e", "c a", (1, 1), "c``b`` ` d ` a", False),
        ("_a_ b", "B a", (2, 3), "B _a_", False),
        ("_a_ b", "Ba", (1, 2), "B_a_", True),
        ("*a* b", "Ba", (1, 2), "B*a*", False),
        ("*a* *b* c", "abc", (0, 1, 1, 2), "*a**b*c", True),
        ("**(a)** b", "(a)b", (0, 3), "**(a)**b", True),
        ("~~a~~ *b*", "ab", (0, 1, 1, 2), "~~a~~*b*", False),
        ("> a <b\n> c> d", "a d", (3,), "> a d<b\n> c>", False),
    ],
)
def test_tags_that_become_text_are_reported(
    text: str, translation: str, positions: tuple[int, ...], expected: str, warned: bool
) -> None:
    """Pieces of code stay apart, and emphasis that is none beside other characters gives a warning."""
    document = open_markdown(text)
    [unit] = document.units
    markup = tuple(tag._replace(position=new) for tag, new in zip(unit.markup, positions, strict=True))
    assert document.write([MarkedText(translation, markup)]).decode() == expected
    assert document.warnings == ({1: JOINED_WARNING} if warned else {})
    kept = sum(len(unit.markup) for unit in open_markdown(expected).units) == len(markup)
    assert kept == (not warned)


@pytest.mark.parametrize(
    ("text", "translation", "positions", "warned"),
    [
        ("**a** **b** **c**", "一二三", (0, 1, 1, 2, 2, 3), True),
        ("**[a](u)** **b c** **d**", "一二三", (0, 0, 1, 1, 1, 2, 2, 3), True),
        ("**a** **b** **c**", "一 二 三", (0, 1, 2, 3, 4, 5), False),
        ("a <i>b</i> [](u) c", "a b c", (2, 2, 4), False),
    ],
)
def test_tags_with_other_partners_are_reported(
    text: str, translation: str, positions: tuple[int, ...], warned: bool
) -> None:
    """Nothing is lost where pairs in a row become pairs in each other, but it is other text that they enclose."""
    document = open_markdown(text)
    [unit] = document.units
    markup = tuple(tag._replace(position=new) for tag, new in zip(unit.markup, positions, strict=True))
    document.write([MarkedText(translation, markup)])
    assert document.warnings == ({1: JOINED_WARNING} if warned else {})


@pytest.mark.parametrize("start", ["1. ", "2) ", "- ", "+ ", "# ", "> ", ": ", "=== "])
@pytest.mark.parametrize("line_break", ["\\\n", "  \n", "\\\n> "])
@pytest.mark.parametrize("space", ["", " "])
def test_no_line_of_a_paragraph_becomes_another_block(start: str, line_break: str, space: str) -> None:
    """A line begins after a hard line break, too, and the space before a word may stand behind the break."""
    document = open_markdown(f"> Open on{line_break}May" if ">" in line_break else f"Open on{line_break}May")
    [unit] = document.units
    text = f"Offen am{space}{start}Mai"
    written = document.write([MarkedText(text, (unit.markup[0]._replace(position=len("Offen am")),))])
    [again] = open_markdown(written.decode()).units
    assert [tag.raw.rstrip(" ") for tag in again.markup] == [line_break.rstrip(" ")]
    assert again.text.replace(" ", "") == text.replace(" ", "")
    assert not document.warnings


@pytest.mark.parametrize(
    ("text", "translation", "positions", "expected"),
    [
        ("Press * to go", "* zum Gehen", (), "\\* zum Gehen"),
        ("a * b * c *", "* * *", (), "\\* * *"),
        ("a ___ b", "___", (), "\\___"),
        ("a --- b", "---", (), "\\---"),
        ("a < b", "<b a", (), "\\<b a"),
        ("[x] a b", "[x]: b", (), "[x]\\: b"),
        ("[x] a b", "[x]: siehe b", (), "[x]\\: siehe b"),
        ("[x] a\\\nb", "[x]: b", (4,), "[x]\\:\\\n b"),
        ("[x] a\\\nb", "b [x]: b", (2,), "b \\\n[x]\\: b"),
        ("a [^1] b", ": a b", (0,), "[^1]\\: a b"),
        ("a *b* -", "- b", (0, 3), "*- b*"),
        ("# * a", "* b", (), "# * b"),
    ],
)
def test_characters_that_move_to_the_front_stay_text(
    text: str, translation: str, positions: tuple[int, ...], expected: str
) -> None:
    document = open_markdown(text)
    [unit] = document.units
    markup = tuple(tag._replace(position=new) for tag, new in zip(unit.markup, positions, strict=True))
    assert document.write([MarkedText(translation, markup)]).decode() == expected
    assert not document.warnings
    if any(map(str.isalpha, translation)):
        assert len(open_markdown(expected).units) == 1


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("Use `` ``` `` to fence code.", ["`` ``` ``"]),
        ("Use ` `` ` here", ["` `` `"]),
        ("a `b`` c` d", ["`b`` c`"]),
        ("a ``b` c", []),
        ("a \\`b` c `d` e", ["` c `"]),
        ("a \\``b` c", ["`b`"]),
        ("a `b\\` *c*", ["`b\\`", "*", "*"]),
        ("a ```b``*`` c``` *d*", ["```b``*`` c```", "*", "*"]),
        (f"a `{'*b* ' * 1000}` c", [f"`{'*b* ' * 1000}`"]),
    ],
)
def test_code_ends_at_as_many_backticks(text: str, tags: list[str]) -> None:
    document = open_markdown(text)
    [unit] = document.units
    assert [tag.raw for tag in unit.markup] == tags
    assert write_marked(document).translate(KEPT) == text.translate(KEPT)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[Draft][Guide](docs/guide.md) is here", "[Draft]<[:Guide> is here"),
        ("[Draft][Guide][b] is here", "[Draft]<[:Guide> is here"),
        ("[Draft][ B\n](fo) is here", "<[:Draft>(fo) is here"),
        ("[Draft][b\\]c] is here", "<[:Draft> is here"),
        ("[Draft][fo.ba] is here", "<[:Draft> is here"),
    ],
)
def test_full_references_have_labels(text: str, shown: str) -> None:
    """A label that the file does not define is one, too, as tools such as mkdocs-autorefs define others."""
    document = open_markdown(f"{text}\n\n[b]: x\n")
    [unit] = document.units
    assert show(unit) == shown
    assert write_marked(document).translate(KEPT) == f"{text}\n\n[b]: x\n".translate(KEPT)


@pytest.mark.parametrize(
    "end",
    [
        '](b "x (y" )', '](b "q )")', "](b\\)c)", "](<b c)>)", '](<b\\>)> "d")', "](b 'x\\') y')", "](b (x\\) y))",
        "](b(c(d)))", "]()", "](\n  b\n  'c\n  )'\n)", '](<> ")")', '](<>)', "]({{ b | c }}/d)", "]({% b c.md %} 'd)')",
        "](b c (d))", '](b"c)', '](b){: .c}',
    ],
)  # fmt: skip
def test_links_end_behind_their_address_and_title(end: str) -> None:
    text = f"ba [a{end} z) *b*"
    document = open_markdown(text)
    [unit] = document.units
    assert (unit.text, [tag.raw for tag in unit.markup]) == ("ba a z) b", ["[", end, "*", "*"])
    assert write_marked(document).translate(KEPT) == text.translate(KEPT)


@pytest.mark.parametrize(
    ("text", "position", "warned"),
    [
        ("Hi <details> x", 0, True),
        ("Hi $$a$$ x", 0, True),
        ("Hi <kbd> x", 0, False),
        ("Hi <details> x", 2, False),
        ("> Hi $$a$$ x", 0, True),
        ("a|b\n-|-\nHi <div> x|", 0, False),
    ],
)
def test_tags_that_begin_a_block_are_reported(text: str, position: int, warned: bool) -> None:
    """They cannot be escaped, and an HTML block has no emphasis or links."""
    document = open_markdown(text)
    *others, unit = document.units
    moved = MarkedText("x Hi", (unit.markup[0]._replace(position=position),))
    document.write([*(other.content for other in others), moved])
    assert list(document.warnings.values()) == [BLOCK_WARNING] * warned


SIMPLE = "  Right     Left\n-------     ------\n     12     twelve\n    123     more\n"
HEADLESS = "-------     ------\n     12     twelve\n    123     more\n-------     ------\n"
MULTILINE = """\
--------------------
 Centered   Default
  Header    Aligned
---------- ---------
   First    row
            one

   Second   row
--------------------
"""
GRID = "+-----+-----+\n| One | Two |\n+=====+=====+\n| - a | b   |\n|     |     |\n+-----+-----+\n"
ENVIRONMENT = "\\begin{table}[h]\nSome text\n\nAnd more & cells\n\\end{table}\n"


@pytest.mark.parametrize("block", [SIMPLE, HEADLESS, MULTILINE, GRID, ENVIRONMENT, "\\newpage\n", "\\vspace{1em}\n"])
@pytest.mark.parametrize("before", ["", "Before it.\n\n"])
@pytest.mark.parametrize("after", ["", "\nBehind it.\n"])
def test_tables_and_tex_of_pandoc_stay_as_they_are(block: str, before: str, after: str) -> None:
    text = before + block + after
    document = open_markdown(text)
    assert [unit.text for unit in document.units] == [part.strip() for part in (before, after) if part]
    assert document.skipped == 1
    assert write_marked(document) == text


def test_lines_after_bars_are_texts() -> None:
    text = "| A line of verse\n|    and another,\n  that goes on\n|\n| The last one\n\nText\n"
    document = open_markdown(text)
    assert [unit.text for unit in document.units] == [
        "A line of verse", "and another, that goes on", "The last one", "Text"
    ]  # fmt: skip
    assert write_marked(document) == text.replace(",\n  that", ", that")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('![alt](a.png){width="6.5in"\nheight="4in"} b', "<![:alt> b"),
        ('[a](b){target="_blank" .ext} c', "<[:a> c"),
        ('[a]{custom-style="Big Text"} b', "<[:a> b"),
        ("[a]{.smallcaps} b {c} [d]", "<[:a> b {c} [d]"),
        ("a`<br/>`{=html} b `c`{.py}", "a`<br/>`{=html} b `c`{.py}"),
        (r"see \ref{fig:one} and \emph{this}", r"see \ref{fig:one} and \emph{this}"),
    ],
)
def test_attributes_and_tex_of_pandoc_are_tags(text: str, shown: str) -> None:
    document = open_markdown(text)
    [unit] = document.units
    assert show(unit) == shown
    assert not any(word in unit.text for word in ("width", "style", "target", "smallcaps", "html", "ref", "py"))
    assert write_marked(document) == text


@pytest.mark.parametrize("text", [r"a C:\temp b", r"a \LaTeX b", r"one \\LaTeX two"])
def test_a_backslash_before_a_letter_stays_as_it_is(text: str) -> None:
    document = open_markdown(text)
    translation = MarkedText(f"{document.units[0].text}!")
    assert document.write([translation]).decode() == f"{text}!"


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("--- ---\n\nText\n\n- - -\n", ["Text"]),
        ("Text\n--- ---\n\nMore\n--- ---", ["Text", "More"]),
        ("\\begin{a}\n\nText\n", ["Text"]),
        ("a | b\n--- | ---\nc | d\n", ["a", "b", "c", "d"]),
        ("| a | b |\n|---|---|\n| c | d |\n", ["a", "b", "c", "d"]),
        ("Text\n-----\n", ["Text"]),
    ],
)
def test_what_only_looks_like_a_table_is_read(text: str, units: list[str]) -> None:
    assert [unit.text for unit in open_markdown(text).units] == units
