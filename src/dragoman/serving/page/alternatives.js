// The popup with other words for a word of a translation, and the list of other translations of a sentence.

import { limits, postJson } from "./api.js";

const WORDS = 8;
const SENTENCES = 6;
const MAX_REST = 90; // characters shown of the text after a word

export class AlternativesPopup {
  constructor(element) {
    this.element = element;
    this.title = element.querySelector(".popup-title");
    this.list = element.querySelector("ul");
    this.state = element.querySelector(".hint");
    element.addEventListener("keydown", event => this.pressKey(event));
    this.list.addEventListener("click", event => this.take(event.target.closest("[role=option]")));
    document.addEventListener("pointerdown", event => !element.hidden && !element.contains(event.target) && this.close(false));
    element.addEventListener("focusout", event => event.relatedTarget && !element.contains(event.relatedTarget) && this.close(false));
    addEventListener("resize", () => this.close(false));
  }

  /** Show other words for a word of a column; `found` is what Column.findWord returns. */
  async open(column, found) {
    this.close(false);
    const { part, node } = found;
    const prefix = column.textBefore(found);
    Object.assign(this, { column, found, prefix });
    this.title.textContent = `Instead of “${node.textContent}”`;
    this.list.replaceChildren();
    this.state.textContent = "Looking for other words …";
    this.element.hidden = false;
    node.classList.add("open");
    this.place();
    this.list.tabIndex = -1;
    this.list.focus({ preventScroll: true });
    this.controller = new AbortController();
    const { source, target, model } = column.request;
    const body = { text: part.text, source, target, model, prefix, count: WORDS };
    try {
      const { alternatives } = await postJson("api/words", body, { signal: this.controller.signal });
      this.show(alternatives, node.textContent);
    } catch (error) {
      if (error.name !== "AbortError") this.state.textContent = error.message;
    }
    this.place();
  }

  show(alternatives, current) {
    this.state.textContent = alternatives.length ? "" : "The model has no other word here.";
    this.list.replaceChildren(...alternatives.map(({ word, text, probability }) => {
      const option = document.createElement("li");
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", word === current);
      option.tabIndex = -1;
      option.style.setProperty("--share", Math.max(0.008, probability).toFixed(4));
      const after = text.indexOf(word, Math.max(0, this.prefix.trimEnd().length)) + word.length;
      Object.assign(option, { beginning: text.slice(0, after) });
      const rest = text.slice(after, after + MAX_REST) + (text.length > after + MAX_REST ? "…" : "");
      option.append(make("bdi", "word-choice", word), make("span", "percent", formatPercent(probability)), make("span", "rest", rest));
      option.lastChild.dir = "auto";
      return option;
    }));
    if (this.list.contains(document.activeElement) || document.activeElement === this.list) this.list.firstChild?.focus({ preventScroll: true });
  }

  /** Put the popup under the word, inside the window. */
  place() {
    const word = this.found.node.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const below = word.bottom + 8 + height <= innerHeight || word.top < height + 8;
    this.element.style.left = `${Math.max(8, Math.min(word.left - 12, innerWidth - width - 8)) + scrollX}px`;
    this.element.style.top = `${(below ? word.bottom + 8 : word.top - height - 8) + scrollY}px`;
  }

  pressKey(event) {
    const options = [...this.list.children];
    const position = options.indexOf(document.activeElement);
    const moves = { ArrowDown: position + 1, ArrowUp: position - 1, Home: 0, End: options.length - 1 };
    if (event.key in moves && options.length) options[(moves[event.key] + options.length) % options.length].focus();
    else if (["Enter", " "].includes(event.key)) this.take(document.activeElement.closest("[role=option]"));
    else if (["Escape", "Tab"].includes(event.key)) this.close(true);
    else return;
    event.preventDefault();
  }

  take(option) {
    if (!option) return;
    const { column, found } = this;
    this.close(true);
    if (option.getAttribute("aria-selected") !== "true") column.forcePrefix(found.part, option.beginning);
  }

  close(returnFocus) {
    if (this.element.hidden) return;
    this.controller?.abort();
    this.element.hidden = true;
    this.found.node.classList.remove("open");
    if (!returnFocus) return;
    if (this.found.node.isConnected) this.found.node.focus({ preventScroll: true });
    else this.column.output.focus({ preventScroll: true });
  }
}

/** Fill `box` with other translations of the column's current sentence. */
export async function showOthers(column, box) {
  const part = column.parts[column.active];
  box.replaceChildren(make("p", "hint", "Looking for other translations …"));
  box.entry = part.entry;
  try {
    const count = Math.min(SENTENCES, limits.max_nbest);
    const body = column.makeBody(part.text, { align: false, nbest: count, beam: count, prefix: "" });
    const { translations: [{ text, alternatives }] } = await postJson("api/translate", body);
    if (box.entry !== part.entry) return;
    const others = [text, ...alternatives.map(other => other.text)].filter(other => other !== part.entry.text);
    const list = document.createElement("ol");
    list.className = "others-list";
    for (const other of others) {
      const button = make("button", "", "");
      button.type = "button";
      button.dir = "auto";
      button.append(...markDifferences(other, part.entry.text));
      button.addEventListener("click", () => {
        column.forcePrefix(part, other);
        column.output.focus();
      });
      const item = document.createElement("li");
      item.append(button);
      list.append(item);
    }
    const title = column.sentences.length > 1 ? `Other translations of “${part.text}”` : "Other translations";
    box.replaceChildren(make("h3", "", title), others.length ? list : make("p", "hint", "The model has no other translation."));
  } catch (error) {
    if (box.entry === part.entry) box.replaceChildren(make("p", "problem", error.message));
  }
}

/** Return the text as nodes, with the words marked that another text does not have in the same order. */
function markDifferences(text, other) {
  const words = text.split(/(\s+)/);
  const others = other.split(/(\s+)/);
  // length[i][j]: of the longest common subsequence of words[i:] and others[j:]
  const length = Array.from({ length: words.length + 1 }, () => new Uint16Array(others.length + 1));
  for (let i = words.length - 1; i >= 0; i--) {
    for (let j = others.length - 1; j >= 0; j--) {
      length[i][j] = words[i] === others[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
    }
  }
  const nodes = [];
  for (let i = 0, j = 0; i < words.length; ) {
    if (j < others.length && words[i] === others[j]) {
      nodes.push(words[i++]);
      j++;
    } else if (j < others.length && length[i][j + 1] >= length[i + 1][j]) j++;
    else nodes.push(/\s/.test(words[i]) ? words[i++] : make("mark", "", words[i++]));
  }
  return nodes;
}

function formatPercent(probability) {
  const percent = 100 * probability;
  return percent < 0.1 ? "< 0.1 %" : `${percent < 10 ? percent.toFixed(1) : percent.toFixed(0)} %`;
}

function make(tag, className, text) {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}
