"""A few German sentences with English translations, tokenised, for tests of statistical MT."""

SOURCE = [
    "der kleine hund läuft",
    "der hund schläft",
    "eine katze schläft im haus",
    "das haus ist klein",
    "der mann läuft",
    "eine kleine katze läuft",
]
TARGET = [
    "the small dog runs",
    "the dog sleeps",
    "a cat sleeps in the house",
    "the house is small",
    "the man runs",
    "a small cat runs",
]
