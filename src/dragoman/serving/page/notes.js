// Warnings and flags of translations in plain words.

import { toSentence } from "./api.js";

const FLAGS = {
  "with repetitions": "Something is repeated that the source does not repeat.",
  "far too long": "This is much longer than usual for such a text.",
  "far too short": "This is much shorter than usual for such a text; something may be missing.",
  "copying the source": "Much of the source was copied instead of translated.",
  "with unknown words left out": "Words that the model does not know were left out.",
};
const WARNINGS = [
  [/^longer than any sentence of training: translated in (\d+) parts$/, "The sentence is very long, so it was translated in $1 parts."],
  [/^longer than any sentence of training .*/, "The sentence is longer than any that the model has learned from. Read the translation with care."],
  [/^cut at (\d+) tokens.*/, "The translation was cut off: it became too long for the model."],
  [/^with placeholders, tags or links missing from the translation: (.*)/s, "Missing from the translation: $1."],
  [/^with placeholders, tags or links not in the source: (.*)/s, "Not in the source: $1."],
  [/^not beginning as it was asked to: .*/s, "The model cannot write the chosen beginning exactly."],
  [/^not translated: already in the target language$/, "This is in the target language already."],
  [/^too long for an alignment$/, "The text is too long to show which words belong together."],
];

/** Return the warnings and flags of a translation as sentences. */
export function describeHypothesis({ warnings, flags }) {
  return [...new Set([...warnings.map(describeWarning), ...flags.map(flag => FLAGS[flag]).filter(Boolean)])];
}

/** Return a warning about a part of a document, such as "unit 3: far too long", as a sentence after the name of the part. */
export function describeDocumentWarning(text) {
  const [, part, warning] = /^(.+?): (.*)$/s.exec(text) ?? [];
  return part && !findKnown(text) ? `${part[0].toUpperCase()}${part.slice(1)}: ${describeWarning(warning)}` : describeWarning(text);
}

const findKnown = warning => WARNINGS.find(([pattern]) => pattern.test(warning));

function describeWarning(warning) {
  const known = findKnown(warning);
  return known ? warning.replace(...known) : FLAGS[warning] ?? toSentence(warning);
}
