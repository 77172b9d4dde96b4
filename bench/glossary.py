"""Count how often a glossary exchanges one noun of a translation and leaves all other words as they are.

    python bench/glossary.py runs/demo

The sentences are those of the phrasebook's test set in which a noun occurs once. The glossary translates it by another
noun of the same gender or, with --invented, by a word that does not exist. A translation is correct if it is the
reference with the noun exchanged, so no more can be correct than without a glossary.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from random import Random

from dragoman import Line
from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.phrasebook.generate import generate_pairs
from dragoman.phrasebook.lexicon import load_lexicon

INVENTED = ("Blarg", "Fontel", "Zwiek", "Trummer", "Wauwau")


def make_lines(count: int, *, invented: bool) -> list[tuple[Line, str, str]]:
    """Return lines with a pair of terms, their references, and the references with the noun exchanged."""
    random, lines = Random(1), list[tuple[Line, str, str]]()
    nouns = [noun for noun in load_lexicon().nouns if not noun.proper]
    uninflected = [noun for noun in nouns if len(set(noun.forms[1][0][:3])) == 1]  # in all cases but the genitive
    words = {noun: (noun.lemma, noun.forms[1][0][0]) for noun in nouns}
    for pair in generate_pairs("test", 10 * count):
        sides = [re.findall(r"\w+", pair.source.lower()), re.findall(r"\w+", pair.target)]
        found = [noun for noun in nouns if all(side.count(word) == 1 for side, word in zip(sides, words[noun]))]
        if found and len(lines) < count:
            noun = random.choice(found)
            others = [other for other in uninflected if (other.gender, other.mass) == (noun.gender, noun.mass)]
            german = [words[other][1] for other in others if words[other][1] not in sides[1]]
            source, target = words[noun]
            term = random.choice(INVENTED if invented else german)
            line = Line(pair.source, terms=((source, term),))
            lines.append((line, pair.target, re.sub(rf"\b{target}\b", term, pair.target)))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--invented", action="store_true", help="terms that do not exist")
    options = parser.parse_args()
    translator, lines = load_as(Translator, options.run), make_lines(options.lines, invented=options.invented)
    plain = translator.translate([line.text for line, _, _ in lines], align=False)
    with_terms = translator.translate([line for line, _, _ in lines], align=False)
    for name, column, hypotheses in (("without a glossary", 1, plain), ("with a glossary", 2, with_terms)):
        correct = sum(hypothesis.text == row[column] for row, hypothesis in zip(lines, hypotheses, strict=True))
        print(f"{name}: {correct} of {len(lines)} correct")


if __name__ == "__main__":
    main()
