// One column with the translation of the source text by one model.
//
// The text is translated sentence by sentence. `entries` keeps the translation of each sentence as long as the sentence
// is in the text, so typing costs only the sentence that changes. A request for a sentence that is gone is aborted.

import { ApiError, limits, postJson, stream } from "./api.js";
import { describeHypothesis } from "./notes.js";
import { renderWords, sliceText } from "./sentences.js";

const PARALLEL = 4; // requests at the same time
const BATCH = 16; // sentences of a request, if many wait
const MIN_WEIGHT = 0.08; // smaller attention weights are not shown

export class Column {
  /** `on` has the functions called when the state changes: changed, hovered, chosen (a word). */
  constructor(element, on) {
    this.element = element;
    this.on = on;
    this.output = element.querySelector(".output");
    this.problem = element.querySelector(".problem");
    this.entries = new Map(); // key -> {state, text, result, prefix, error, version, controller}
    this.prefixes = new Map(); // sentence and languages -> beginning that the user has chosen
    this.parts = []; // of the source, each with its entry
    this.shown = []; // what stands in the output: {key, version, node}
    this.request = { source: "", target: "", model: "" };
    this.active = 0; // index of the sentence that "look inside" and "other translations" are about
    this.listen();
  }

  get model() {
    return this.request.model;
  }

  get sentences() {
    return this.parts.filter(part => part.isSentence);
  }

  get isDone() {
    return this.sentences.every(part => part.entry.state === "done");
  }

  get text() {
    return this.parts.map((part, index) => this.textOf(part, index)).join("");
  }

  /** Return the translation of a part. A space is added between sentences that had none, as in Chinese. */
  textOf(part, index) {
    if (!part.isSentence) return part.text;
    const text = part.entry.text;
    const needsSpace = this.parts[index + 1]?.isSentence && !/[\u2e80-\ua4cf\uff00-\uffef]$/u.test(text);
    return needsSpace ? text + " " : text;
  }

  makeKey(text, prefix) {
    const { source, target, model } = this.request;
    return JSON.stringify([source, target, model, text, prefix]);
  }

  /** Show the translation of these parts; `request` has the languages and the model. Requests start after `delay`. */
  update(parts, request, delay) {
    this.request = request;
    const before = this.parts;
    const isSameShape = before.length === parts.length;
    this.parts = parts.map((part, index) => {
      if (!part.isSentence) return { ...part };
      const choice = JSON.stringify([request.source, request.target, request.model, part.text]);
      const key = this.makeKey(part.text, this.prefixes.get(choice) ?? "");
      if (!this.entries.has(key) || this.entries.get(key).state === "error") {
        const prefix = this.prefixes.get(choice) ?? "";
        this.entries.set(key, { key, source: part.text, state: "waiting", text: "", prefix, version: 0 });
      }
      const entry = this.entries.get(key);
      // While a sentence is not translated yet, the translation of what stood in its place is shown, greyed out.
      const old = isSameShape && before[index].isSentence ? before[index] : null;
      const outdated = old && old.entry.key !== key ? old.entry.text || old.outdated : old?.outdated;
      return { ...part, choice, entry, outdated: outdated ?? "" };
    });
    const needed = new Set(this.sentences.map(part => part.entry.key));
    for (const [key, entry] of this.entries) {
      if (needed.has(key)) continue;
      this.entries.delete(key);
      entry.controller?.abort();
    }
    this.active = Math.min(this.active, Math.max(0, this.parts.length - 1));
    if (!this.parts[this.active]?.isSentence) this.active = Math.max(0, this.parts.findIndex(part => part.isSentence));
    this.render();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.start(), delay);
  }

  /** Start requests for sentences that wait, as many as may run at the same time. */
  start() {
    const entries = [...this.entries.values()];
    const running = new Set(entries.map(entry => entry.controller).filter(controller => controller)).size;
    const waiting = entries.filter(entry => entry.state === "waiting" && !entry.controller);
    for (let free = PARALLEL - running; free > 0 && waiting.length; free--) {
      const batch = waiting.length > 2 * PARALLEL ? waiting.splice(-Math.min(BATCH, limits.max_texts)).filter(entry => !entry.prefix) : [];
      if (batch.length > 1) this.run(batch, controller => this.translateBatch(batch, controller));
      else {
        const entry = batch[0] ?? waiting.shift();
        if (!entry) break;
        this.run([entry], controller => this.streamEntry(entry, controller));
      }
    }
  }

  async run(entries, work) {
    const controller = new AbortController();
    for (const entry of entries) entry.controller = controller;
    try {
      await work(controller);
    } catch (error) {
      if (error.name === "AbortError") return;
      for (const entry of entries) Object.assign(entry, { state: "error", error, version: entry.version + 1 });
      if (!(error instanceof ApiError)) throw error;
    } finally {
      for (const entry of entries) entry.controller = null;
      this.render();
      // After an error, what waits is not sent: it would fail as well. The user tries again.
      if (!entries.some(entry => entry.state === "error")) this.start();
    }
  }

  makeBody(text, more = {}) {
    const { source, target, model } = this.request;
    return { text, source, target, model, align: true, ...more };
  }

  async streamEntry(entry, controller) {
    const { signal } = controller;
    const onPart = text => {
      entry.text += text;
      entry.version++;
      entry.state = "running";
      this.renderSoon();
    };
    const body = this.makeBody(entry.source, entry.prefix ? { prefix: entry.prefix } : {});
    const answer = await stream(body, { signal, onPart, onWait: seconds => this.showWait(seconds) });
    this.finish(entry, answer.translations[0]);
  }

  async translateBatch(entries, controller) {
    // A batch is aborted only if none of its sentences is needed any more.
    const abort = controller.abort.bind(controller);
    controller.abort = () => entries.every(entry => this.entries.get(entry.key) !== entry) && abort();
    const body = this.makeBody(entries.map(entry => entry.source));
    const options = { signal: controller.signal, onWait: seconds => this.showWait(seconds) };
    const answer = await postJson("api/translate", body, options);
    entries.forEach((entry, index) => this.finish(entry, answer.translations[index]));
  }

  finish(entry, result) {
    Object.assign(entry, { state: "done", text: result.text, result, version: entry.version + 1 });
  }

  showWait(seconds) {
    this.showProblem(`The server is busy. Trying again in ${seconds} s.`, false);
  }

  /** Translate again what has failed. */
  retry() {
    for (const entry of this.entries.values()) if (entry.state === "error") Object.assign(entry, { state: "waiting", text: "" });
    this.render();
    this.start();
  }

  /** Translate a sentence anew, with a beginning that the user has chosen; "" is any beginning. */
  forcePrefix(part, prefix) {
    if (prefix) this.prefixes.set(part.choice, prefix);
    else this.prefixes.delete(part.choice);
    // The text may have changed since the part was shown.
    const index = Math.max(0, this.parts.findIndex(other => other.choice === part.choice));
    const parts = this.parts.map(({ text, isSentence }) => ({ text, isSentence }));
    this.update(parts, this.request, 0);
    this.active = index;
  }

  // Rendering

  renderSoon() {
    this.frame ??= requestAnimationFrame(() => this.render());
  }

  render() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const nodes = this.parts.map((part, index) => this.renderPart(part, index));
    const isSame = nodes.length === this.output.childNodes.length && nodes.every((node, i) => node === this.output.childNodes[i]);
    if (!isSame) {
      const focused = this.findWord(document.activeElement);
      this.output.replaceChildren(...nodes);
      if (focused) this.output.focus({ preventScroll: true });
    }
    const isBusy = this.sentences.some(part => !["done", "error"].includes(part.entry.state));
    this.output.setAttribute("aria-busy", isBusy);
    const failed = this.sentences.find(part => part.entry.state === "error");
    if (failed) this.showProblem(failed.entry.error.message, true);
    else if (!isBusy || this.sentences.some(part => part.entry.state === "running")) this.showProblem("");
    this.renderNotes();
    const actions = this.element.querySelectorAll(".copy, .others, .inspect");
    for (const button of actions) button.disabled = !this.sentences.length || !this.isDone;
    this.on.changed(this);
  }

  renderPart(part, index) {
    const text = this.textOf(part, index);
    const isOutdated = part.isSentence && !part.entry.text && part.entry.state !== "error";
    const version = part.isSentence ? `${part.entry.key} ${part.entry.version} ${isOutdated && part.outdated}` : "";
    const old = this.shown[index];
    if (old && old.version === version && old.text === text) return old.node;
    const node = part.isSentence ? document.createElement("span") : document.createTextNode(text);
    if (part.isSentence) {
      node.className = "sentence";
      node.dataset.part = index;
      if (isOutdated) {
        node.classList.add(part.outdated ? "outdated" : "pending");
        node.setAttribute("aria-hidden", "true");
        node.textContent = part.outdated || "…";
      } else {
        node.append(...renderWords(text, part.entry.result?.words ?? [], "word"));
        if (part.entry.state === "running") node.classList.add("growing");
        for (const word of node.querySelectorAll(".word")) word.tabIndex = -1;
      }
    }
    this.shown[index] = { version, text, node };
    return node;
  }

  renderNotes() {
    const notes = [];
    const isLong = this.sentences.length > 1;
    for (const part of this.sentences) {
      const quote = isLong ? `“${part.text.length > 40 ? part.text.slice(0, 38) + "…" : part.text}” ` : "";
      for (const note of part.entry.result ? describeHypothesis(part.entry.result) : []) notes.push({ text: quote + note });
      if (part.entry.prefix && part.entry.state === "done") notes.push({ text: `You chose the beginning “${part.entry.prefix}”.`, part });
    }
    const signature = JSON.stringify(notes.map(note => [note.text, this.parts.indexOf(note.part)]));
    if (signature === this.notesSignature) return;
    this.notesSignature = signature;
    const box = this.element.querySelector(".notes");
    box.replaceChildren(...notes.map(note => {
      const line = document.createElement("p");
      line.className = note.part ? "note chosen" : "note";
      line.textContent = note.text;
      if (note.part) {
        const undo = document.createElement("button");
        Object.assign(undo, { type: "button", className: "quiet", textContent: "Undo" });
        undo.addEventListener("click", () => {
          this.forcePrefix(note.part, "");
          this.output.focus();
        });
        line.append(" ", undo);
      }
      return line;
    }));
  }

  showProblem(message, canRetry = false) {
    if (this.problem.dataset.message === message) return;
    this.problem.dataset.message = message;
    this.problem.hidden = !message;
    this.problem.textContent = message;
    if (!canRetry || !message) return;
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "quiet", textContent: "Try again" });
    button.addEventListener("click", () => {
      this.showProblem("");
      this.retry();
    });
    this.problem.append(" ", button);
  }

  // Words

  listen() {
    this.output.addEventListener("pointerover", event => event.pointerType !== "touch" && this.hover(this.findWord(event.target)));
    this.output.addEventListener("pointerleave", () => this.hover(null));
    this.output.addEventListener("focusin", event => {
      const word = this.findWord(event.target);
      this.hover(word);
      if (!word) return;
      word.node.setAttribute("role", "button");
      word.node.setAttribute("aria-haspopup", "dialog");
      this.output.tabIndex = -1;
      word.node.tabIndex = 0;
    });
    this.output.addEventListener("focusout", event => {
      const word = this.findWord(event.target);
      this.output.tabIndex = 0;
      this.hover(null);
      if (!word) return;
      word.node.removeAttribute("role");
      word.node.removeAttribute("aria-haspopup");
      word.node.tabIndex = -1;
    });
    this.output.addEventListener("click", event => {
      const word = this.findWord(event.target);
      if (word && document.getSelection().isCollapsed) this.choose(word);
    });
    this.output.addEventListener("keydown", event => this.pressKey(event));
  }

  pressKey(event) {
    const words = [...this.output.querySelectorAll(".word")];
    const position = words.indexOf(document.activeElement);
    const isReversed = getComputedStyle(document.activeElement).direction === "rtl";
    const steps = { ArrowRight: isReversed ? -1 : 1, ArrowLeft: isReversed ? 1 : -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (event.key in steps && words.length && !event.ctrlKey && !event.metaKey && !event.altKey) {
      const next = position < 0 ? 0 : Math.min(words.length - 1, Math.max(0, position + steps[event.key]));
      words[next].focus();
      event.preventDefault();
    } else if (["Enter", " "].includes(event.key) && position >= 0) {
      this.choose(this.findWord(words[position]));
      event.preventDefault();
    } else if (event.key === "Escape" && position >= 0) this.output.focus();
  }

  /** Return the word that an element of the output shows: its part, its number, its node. */
  findWord(node) {
    if (!node?.classList?.contains("word") || !this.output.contains(node)) return null;
    const index = Number(node.parentNode.dataset.part);
    return { index, part: this.parts[index], word: Number(node.dataset.word), node };
  }

  choose(found) {
    this.active = found.index;
    if (found.part.entry.state === "done") this.on.chosen(this, found);
  }

  /** Return the text before a word of a translation. */
  textBefore({ part, word }) {
    return sliceText(part.entry.text, 0, part.entry.result.words[word][0]);
  }

  hover(found) {
    this.clearMarks();
    this.on.hovered(this, null);
    if (found?.part?.entry.state !== "done") return;
    found.node.classList.add("pointed");
    const weights = found.part.entry.result.word_alignment[found.word] ?? [];
    this.on.hovered(this, { index: found.index, weights });
  }

  clearMarks() {
    for (const word of this.output.querySelectorAll(".aligned, .pointed")) word.classList.remove("aligned", "pointed");
  }

  /** Mark the words that were translated from a word of the source. */
  markTargets(index, sourceWord) {
    this.clearMarks();
    const part = this.parts[index];
    if (part?.entry?.state !== "done") return;
    const words = this.shown[index].node.querySelectorAll(".word");
    mark(words, part.entry.result.word_alignment.map(row => row[sourceWord]));
  }
}

/** Mark words by their weights. */
export function mark(words, weights) {
  words.forEach((word, index) => {
    if (!(weights[index] >= MIN_WEIGHT)) return;
    word.classList.add("aligned");
    word.style.setProperty("--weight", Math.min(1, weights[index]).toFixed(3));
  });
}
