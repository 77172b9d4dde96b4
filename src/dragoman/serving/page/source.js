// The source text: a text area, and behind it the same text with words that can be marked.

import { mark } from "./column.js";
import { renderWords } from "./sentences.js";

export class SourceText {
  /** `pointed` is called with the index of a part and a word, or with null. */
  constructor(area, mirror, pointed) {
    Object.assign(this, { area, mirror, pointed, signature: "" });
    area.addEventListener("pointermove", event => this.point(this.findWord(event.clientX, event.clientY)));
    area.addEventListener("pointerleave", () => this.point(null));
    area.addEventListener("blur", () => this.point(null));
    document.addEventListener("selectionchange", () => document.activeElement === area && this.followCaret());
  }

  /** Show the parts of the text with the words that the server has found in each. */
  render(parts, words) {
    const signature = JSON.stringify([parts.map(part => part.text), words]);
    if (signature === this.signature) return;
    this.signature = signature;
    this.parts = parts;
    const nodes = parts.map((part, index) => {
      if (!part.isSentence) return part.text;
      const node = document.createElement("span");
      node.dataset.part = index;
      node.append(...renderWords(part.text, words[index] ?? [], "source-word"));
      return node;
    });
    this.mirror.replaceChildren(...nodes, "\u200b"); // a line break at the end needs something after it
    this.area.classList.toggle("long", this.area.value.length > 400);
    this.mirror.classList.toggle("long", this.area.value.length > 400);
  }

  findWord(x, y) {
    return document.elementsFromPoint(x, y).find(element => element.classList.contains("source-word")) ?? null;
  }

  /** Point at the word beside the caret. */
  followCaret() {
    const { selectionStart, selectionEnd } = this.area;
    const walker = document.createTreeWalker(this.mirror, NodeFilter.SHOW_TEXT);
    let end = 0;
    let found = null;
    while (selectionStart === selectionEnd && end <= selectionStart && walker.nextNode()) {
      const start = end;
      end += walker.currentNode.length;
      const word = walker.currentNode.parentNode;
      if (start <= selectionStart && selectionStart <= end && word.classList.contains("source-word")) found = word;
    }
    this.point(found);
  }

  point(word) {
    if (word === this.current) return;
    this.current = word;
    this.clearMarks();
    word?.classList.add("pointed");
    this.pointed(word && { index: Number(word.parentNode.dataset.part), word: Number(word.dataset.word) });
  }

  clearMarks() {
    for (const word of this.mirror.querySelectorAll(".aligned, .pointed")) word.classList.remove("aligned", "pointed");
  }

  markSources(index, weights) {
    this.clearMarks();
    mark(this.mirror.querySelectorAll(`[data-part="${index}"] .source-word`), weights);
  }
}
