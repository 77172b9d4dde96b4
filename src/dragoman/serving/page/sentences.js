// Texts as sentences, which are translated one by one, and gaps between them, which are copied.

const END = /[.!?…]+["'“”’«»‹›)\]]*(?=\s)|[。！？]+[”’」』)\]]*/gu;
const LETTER = /[\p{L}\p{N}]/u;

/** Split a text into parts {text, isSentence} that add up to it. Line breaks always end a sentence. */
export function splitText(text) {
  const parts = [];
  const add = (part, isSentence) => {
    const last = parts.at(-1);
    if (!part) return;
    if (!isSentence && last && !last.isSentence) last.text += part;
    else parts.push({ text: part, isSentence });
  };
  for (const line of text.split(/(\r\n|[\n\r\v\f\u0085\u2028\u2029])/u)) {
    let end = 0;
    for (const sentence of splitSentences(line)) {
      const start = line.indexOf(sentence, end);
      add(line.slice(end, start), false);
      add(sentence, LETTER.test(sentence));
      end = start + sentence.length;
    }
    add(line.slice(end), false);
  }
  return parts;
}

/** Split a line after punctuation that ends a sentence, but not after abbreviations such as "Dr." (as the server does). */
function splitSentences(line) {
  const sentences = [];
  const hasCapitals = line !== line.toLowerCase();
  let start = 0;
  for (const mark of line.matchAll(END)) {
    const end = mark.index + mark[0].length;
    const after = line.slice(end).trimStart()[0];
    if (hasCapitals && after && after !== after.toUpperCase()) continue;
    const word = line.slice(Math.max(0, mark.index - 20), mark.index).split(" ").at(-1).replace(/^["'“„«(]+/u, "");
    const isTitle = word.length <= 3 && /^\p{Lu}\p{Ll}*$/u.test(word);
    const isAbbreviation = word.length === 1 || isTitle || word.includes(".");
    if (mark[0] !== "." || !(isAbbreviation || /^\p{Nd}+$/u.test(word))) {
      sentences.push(line.slice(start, end));
      start = end;
    }
  }
  sentences.push(line.slice(start));
  return sentences.map(sentence => sentence.trim()).filter(Boolean);
}

/** Return the string of the characters from `start` to `end`, which count code points, as the server does. */
export function sliceText(text, start, end) {
  return /[\ud800-\udbff]/.test(text) ? [...text].slice(start, end).join("") : text.slice(start, end);
}

/** Return an element's children for a text with words: text nodes, and a span for each word. */
export function renderWords(text, spans, className) {
  const nodes = [];
  let end = 0;
  spans.forEach(([start, stop], index) => {
    if (start > end) nodes.push(sliceText(text, end, start));
    const word = document.createElement("span");
    word.className = className;
    word.dataset.word = index;
    word.textContent = sliceText(text, start, stop);
    nodes.push(word);
    end = stop;
  });
  nodes.push(sliceText(text, end));
  return nodes;
}
