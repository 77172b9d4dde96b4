// The page: languages, models, columns, the key, and the address that keeps text and languages.

import { AlternativesPopup, showOthers } from "./alternatives.js";
import { getJson, key, limits, postJson, UNREACHABLE, whenKeyIsNeeded } from "./api.js";
import { Column } from "./column.js";
import { Documents, formatBytes } from "./documents.js";
import { splitText } from "./sentences.js";
import { SourceText } from "./source.js";

const AUTO = "auto";
const UNKNOWN = "und"; // the code of a language that the server does not know
const DELAY = 250; // milliseconds after the last key before requests start
const DETECTED = 1000; // characters that are enough to detect the language
const MAX_LINKED = 2000; // characters of a text that the address keeps
const $ = id => document.getElementById(id);

const page = { settings: {}, models: [], languages: [], columns: [], detected: "", parts: [] };
const source = new SourceText($("source-text"), $("mirror"), pointAtSource);
const popup = new AlternativesPopup($("alternatives"));
const documents = new Documents($("documents"), chooseForDocument, announce);

// Start

async function start() {
  whenKeyIsNeeded(askForKey);
  $("problem").hidden = true;
  try {
    page.settings = await getJson("api/settings");
    Object.assign(limits, page.settings);
    if (page.settings.key_required && !key.get()) await askForKey("This server asks for an API key.");
    [page.models, page.languages] = await Promise.all([getJson("api/models"), getJson("api/languages")]);
  } catch (error) {
    return showStartProblem(error.message);
  }
  $("key-button").hidden = !page.settings.key_required;
  $("version").textContent = `Dragoman ${page.settings.version}`;
  const formats = page.settings.document_formats.map(({ name, suffixes }) => `${name} (${suffixes.join(", ")})`);
  $("formats").textContent = `${formats.join(" · ")}. At most ${formatBytes(page.settings.max_document_bytes)} each.`;
  $("tab-documents").hidden = !page.settings.document_formats.length;
  $("file").accept = page.settings.document_formats.flatMap(format => format.suffixes).join(",");
  if (!page.columns.length) {
    fillLanguages();
    addColumn();
    documents.configure(page.settings);
    addEventListener("hashchange", readAddress);
    listen();
  }
  readAddress();
  if (!$("source-text").value && document.activeElement === document.body) $("source-text").focus();
}

function showStartProblem(message) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: "Try again" });
  button.addEventListener("click", start);
  $("problem").replaceChildren(message, " ", button);
  $("problem").hidden = false;
}

function listen() {
  const area = $("source-text");
  area.addEventListener("input", event => refresh(event.inputType === "insertFromPaste" ? 0 : DELAY));
  $("source-language").addEventListener("change", () => {
    fillTargets();
    refresh(0);
  });
  $("target-language").addEventListener("change", () => {
    fillModels();
    refresh(0);
  });
  $("swap").addEventListener("click", swap);
  $("clear").addEventListener("click", () => {
    area.value = "";
    refresh(0);
    area.focus();
  });
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.addEventListener("click", () => showTab(tab));
    tab.addEventListener("keydown", event => {
      if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
      const other = $(tab.id === "tab-text" ? "tab-documents" : "tab-text");
      if (!other.hidden) showTab(other, true);
      event.preventDefault();
    });
  }
  $("file").addEventListener("change", event => {
    documents.upload(event.target.files);
    event.target.value = "";
  });
  addEventListener("dragover", event => event.dataTransfer.types.includes("Files") && (event.preventDefault(), $("drop").classList.add("over")));
  addEventListener("dragleave", event => !event.relatedTarget && $("drop").classList.remove("over"));
  addEventListener("drop", event => {
    $("drop").classList.remove("over");
    if (!event.dataTransfer.files.length || $("tab-documents").hidden) return;
    event.preventDefault();
    showTab($("tab-documents"));
    documents.upload(event.dataTransfer.files);
  });
  $("key-button").addEventListener("click", () => askForKey("Requests are sent with this key."));
  $("inspection-close").addEventListener("click", () => $("inspection").close());
}

function showTab(tab, hasFocus = false) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    other.setAttribute("aria-selected", other === tab);
    other.tabIndex = other === tab ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = other !== tab;
  }
  popup.close(false);
  if (hasFocus) tab.focus();
  $("language-note").hidden = tab.id !== "tab-text";
  fillTargets(); // the language of a document is detected apart from that of the text
  refresh(0);
}

// Languages and models

const nameOf = code => page.languages.find(language => language.code === code)?.name ?? new Intl.DisplayNames("en", { type: "language" }).of(code);
const isKnown = code => code !== UNKNOWN;

const isText = () => !$("panel-text").hidden;

/** The language of the text: the chosen one, or the detected one; "" before, and for documents. */
function getSource() {
  const chosen = $("source-language").value;
  return chosen !== AUTO ? chosen : isText() ? page.detected : "";
}

const getTarget = () => $("target-language").value;
const findTargets = code => page.languages.find(language => language.code === code)?.targets ?? [];
const toRequest = code => (code === UNKNOWN ? "" : code);

function fillSelect(select, options, value) {
  select.replaceChildren(...options.map(([code, name]) => new Option(name, code)));
  if (options.some(([code]) => code === value)) select.value = value;
}

function fillLanguages() {
  const sources = page.languages.filter(language => language.targets.length);
  const options = sources.map(({ code, name }) => [code, name]);
  if (sources.filter(language => isKnown(language.code)).length > 1) options.unshift([AUTO, "Detect language"]);
  fillSelect($("source-language"), options, $("source-language").value);
  $("languages").hidden = !sources.some(language => isKnown(language.code));
  fillTargets();
}

/** Offer the languages into which the source is translated: all of them until it is detected. */
function fillTargets() {
  const code = getSource();
  const targets = code ? findTargets(code) : [...new Set(page.languages.flatMap(language => language.targets))].sort();
  fillSelect($("target-language"), targets.map(target => [target, nameOf(target)]), getTarget());
  fillModels();
}

/** Return the models between the chosen languages. */
function findModels() {
  const [from, to] = [getSource(), getTarget()];
  const fits = (code, wanted) => !wanted || !code || code === wanted || !isKnown(wanted);
  const found = page.models.filter(({ directions }) => directions.some(d => fits(d.source, from) && fits(d.target, to)));
  return found.length ? found : page.models;
}

function fillModels() {
  const models = findModels();
  const options = models.map(({ name, parameters }) => [name, `${name} · ${(parameters / 1e6).toPrecision(2)} M`]);
  page.columns.forEach((column, index) => {
    const choice = column.element.querySelector(".head select");
    fillSelect(choice, options, choice.value);
    if (index && models.length > 1 && choice.value === page.columns[0].element.querySelector(".head select").value) choice.value = options[1][0];
    choice.closest("label").hidden = models.length < 2;
    column.element.querySelector(".compare").hidden = models.length < 2 || page.columns.length > 1;
  });
  if (models.length < 2 && page.columns.length > 1) removeColumn();
  fillSelect($("document-model"), options, $("document-model").value);
  $("document-model-choice").hidden = models.length < 2;
  const [from, to] = [getSource(), getTarget()];
  const canSwap = from && isKnown(from) && findTargets(to).includes(from);
  $("swap").disabled = !canSwap;
  $("swap").title = canSwap || !from || !to ? "" : `No model translates from ${nameOf(to)} to ${nameOf(from)}`;
}

function swap() {
  const [from, to] = [getSource(), getTarget()];
  const { text } = page.columns[0];
  if (page.columns[0].isDone && text) $("source-text").value = text;
  $("source-language").value = to;
  fillTargets();
  $("target-language").value = from;
  fillModels();
  refresh(0);
}

function chooseForDocument() {
  const model = $("document-model-choice").hidden ? "" : $("document-model").value;
  return { source: toRequest(getSource()) || AUTO, target: toRequest(getTarget()), model };
}

/** Detect the language of the text. A newer text cancels it. */
async function detect(text) {
  const controller = (page.detecting = new AbortController());
  const { languages } = await postJson("api/detect", { text: text.slice(0, DETECTED) }, { signal: controller.signal });
  const sources = languages.filter(({ language }) => findTargets(language).length);
  if (page.detecting !== controller) return;
  const code = sources[0]?.language ?? page.languages.find(language => language.targets.length).code;
  if (code !== page.detected) {
    page.detected = code;
    fillTargets();
  }
  $("language-note").textContent = `Detected: ${nameOf(code)}`;
}

// Columns

function addColumn() {
  const element = $("column-template").content.firstElementChild.cloneNode(true);
  const column = new Column(element, { changed: whenChanged, hovered: markSources, chosen: (...word) => popup.open(...word) });
  const find = selector => element.querySelector(selector);
  const index = page.columns.length;
  page.columns.push(column);
  $("columns").append(element);
  $("columns").classList.toggle("comparing", index > 0);
  if (index) {
    for (const [number, { element: other }] of page.columns.entries()) {
      other.querySelector("h2").textContent = `Translation ${number + 1}`;
      other.querySelector(".output").setAttribute("aria-label", `Translation ${number + 1}`);
    }
  }
  find(".close").hidden = !index;
  find(".close").addEventListener("click", () => {
    removeColumn();
    page.columns[0].element.querySelector(".compare").focus();
  });
  find(".compare").addEventListener("click", () => {
    const added = addColumn();
    refresh(0);
    added.element.querySelector("select").focus();
  });
  find(".head select").addEventListener("change", () => refresh(0));
  find(".copy").addEventListener("click", () => copy(column));
  find(".inspect").addEventListener("click", () => inspect(column));
  find(".others").addEventListener("click", () => toggleOthers(column));
  fillModels();
  return column;
}

function removeColumn() {
  const column = page.columns.pop();
  column.update([], column.request, 0);
  column.element.remove();
  $("columns").classList.remove("comparing");
  page.columns[0].element.querySelector("h2").textContent = "Translation";
  page.columns[0].output.setAttribute("aria-label", "Translation");
  fillModels();
  refresh(0);
}

/** Translate the text as it is now. */
function refresh(delay) {
  const text = $("source-text").value;
  popup.close(false);
  if (!isText()) return writeAddress(text);
  page.parts = splitText(text);
  showCounter(text);
  $("clear").hidden = !text;
  const isTooLong = text.length > page.settings.max_characters;
  const update = wait => {
    for (const column of page.columns) {
      const model = column.element.querySelector(".head select").value;
      column.output.lang = isKnown(getTarget()) ? getTarget() : "";
      column.update(isTooLong ? [] : page.parts, { source: toRequest(getSource()) || AUTO, target: toRequest(getTarget()), model }, wait);
    }
  };
  clearTimeout(page.detectTimer);
  page.detecting?.abort();
  if ($("source-language").value !== AUTO || !text.trim()) {
    $("language-note").textContent = "";
    update(delay);
  } else if (page.detected) update(delay + 200);
  if ($("source-language").value === AUTO && text.trim()) {
    page.detectTimer = setTimeout(() => detect(text).then(() => update(0), error => error.name !== "AbortError" && page.columns[0].showProblem(error.message)), delay);
  }
  writeAddress(text);
}

function showCounter(text) {
  const limit = page.settings.max_characters;
  $("counter").textContent = `${text.length.toLocaleString("en")} / ${limit.toLocaleString("en")}`;
  const isOver = text.length > limit;
  $("counter").classList.toggle("over", isOver);
  const wasOver = $("source-text").getAttribute("aria-invalid") === "true";
  $("source-text").setAttribute("aria-invalid", String(isOver));
  if (!isOver) return;
  const problem = "the text is too long. Translate it as a document, or in parts.";
  $("counter").textContent += `: ${problem}`;
  if (!wasOver) announce(problem);
}

function whenChanged(column) {
  if (!page.columns.includes(column)) return;
  const found = page.columns.find(other => other.sentences.some(part => part.entry.result)) ?? column;
  source.render(page.parts, page.parts.map((_, index) => found.parts[index]?.entry?.result?.source_words ?? []));
  const box = column.element.querySelector(".more");
  if (!box.hidden && box.entry !== column.parts[column.active]?.entry && column.isDone) showOthers(column, box);
  clearTimeout(page.announcing);
  if (column.isDone && column.sentences.length) page.announcing = setTimeout(() => announce("Translated."), 1000);
}

function pointAtSource(found) {
  for (const column of page.columns) {
    if (found) column.markTargets(found.index, found.word);
    else column.clearMarks();
  }
}

function markSources(column, found) {
  if (found) source.markSources(found.index, found.weights);
  else source.clearMarks();
}

function announce(message) {
  $("status").textContent = "";
  $("status").textContent = message;
}

async function copy(column) {
  const button = column.element.querySelector(".copy");
  try {
    await navigator.clipboard.writeText(column.text);
  } catch { // only pages of https and this machine may write to the clipboard directly
    const area = Object.assign(document.createElement("textarea"), { value: column.text, className: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  announce("Copied.");
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function toggleOthers(column) {
  const [box, button] = [column.element.querySelector(".more"), column.element.querySelector(".others")];
  box.hidden = !box.hidden;
  button.setAttribute("aria-expanded", !box.hidden);
  if (!box.hidden) showOthers(column, box);
}

async function inspect(column) {
  const part = column.parts[column.active];
  const [dialog, state, link, frame] = [$("inspection"), $("inspection-state"), $("inspection-link"), $("inspection").querySelector("iframe")];
  $("inspection-title").textContent = `“${part.text.length > 60 ? part.text.slice(0, 58) + "…" : part.text}”`;
  state.textContent = "Looking inside the model …";
  frame.hidden = link.hidden = true;
  frame.removeAttribute("src");
  dialog.showModal();
  try {
    const { source: from, target, model } = column.request;
    const { url } = await postJson("api/inspections", { text: part.text, source: from, target, model, prefix: part.entry.prefix });
    frame.src = link.href = url;
    frame.hidden = link.hidden = false;
    state.textContent = "";
  } catch (error) {
    state.textContent = error.message;
  }
}

// Key

function askForKey(reason) {
  const dialog = $("key-dialog");
  if (dialog.open) return new Promise(resolve => dialog.addEventListener("close", () => resolve(dialog.returnValue === "save"), { once: true }));
  $("key-reason").textContent = reason;
  $("key").value = key.get();
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise(resolve => {
    dialog.addEventListener("close", () => {
      const isNew = dialog.returnValue === "save" && Boolean($("key").value.trim());
      if (isNew) key.set($("key").value.trim());
      $("key").value = "";
      resolve(isNew);
    }, { once: true });
  });
}

// Address

function writeAddress(text) {
  const [from, to] = [$("source-language").value, getTarget()];
  const values = { ...(from && isKnown(from) ? { source: from } : {}), ...(to && isKnown(to) ? { target: to } : {}) };
  const model = page.columns[0].element.querySelector(".head select").value;
  if (findModels().length > 1) values.model = model;
  if (text && text.length <= MAX_LINKED) values.text = text;
  page.address = `#${new URLSearchParams(values)}`;
  history.replaceState(null, "", page.address);
}

/** Show the text and the languages of the address. */
function readAddress() {
  if (location.hash === page.address) return;
  const values = new URLSearchParams(location.hash.slice(1));
  const select = (element, value) => value && [...element.options].some(option => option.value === value) && (element.value = value);
  select($("source-language"), values.get("source"));
  page.detected = "";
  fillTargets();
  select($("target-language"), values.get("target"));
  fillModels();
  select(page.columns[0].element.querySelector(".head select"), values.get("model"));
  if (values.has("text") || page.address) $("source-text").value = values.get("text") ?? "";
  refresh(0);
}

addEventListener("unhandledrejection", event => {
  if (event.reason === UNREACHABLE || event.reason?.name === "AbortError") event.preventDefault();
});
start();
