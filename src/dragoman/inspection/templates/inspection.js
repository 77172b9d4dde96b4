// What all sections of the page share: the data, elements with text that is never read as HTML, matrices and their
// colours. Each section has a file of its own with a function that fills it.

const inspection = JSON.parse(document.getElementById("data").textContent);
const LIST_TITLES = { source: "source", input: "decoder input", target: "target" };
const CONTRAST = 0.6; // exponent of the weights: small weights become visible
const SVG = "http://www.w3.org/2000/svg";

function start() {
  const fillers = [fillAttention, fillAttribution, fillPredictions, fillSearch, fillPhrases];
  const sections = [...document.querySelectorAll("main > section")];
  const filled = sections.filter((section, index) => fillers[index](section));
  sections.filter(section => !filled.includes(section)).forEach(section => section.remove());
  const nav = document.querySelector("nav.sections");
  for (const section of filled)
    nav.append(make("a", { href: "#" + section.id }, section.querySelector("h2").textContent));
  nav.hidden = filled.length < 2;
}

// Elements

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes))
    if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value);
  element.append(...children); // strings become text nodes
  return element;
}

// Return a token as an element: isolated from the direction of the text around it, with its ▁ in a lighter colour, and
// with visible characters for spaces and control characters. CSS shortens long tokens; the title has the full text.
function makeToken(text) {
  const body = text.startsWith("▁") ? text.slice(1) : text;
  const shown = makeVisible(body);
  const token = make("bdi", { class: "token", title: text });
  if (body !== text) token.append(make("span", { class: "space" }, "▁"));
  if (shown || body === text) token.append(text === "" ? make("span", { class: "space" }, "(empty)") : shown);
  return token;
}

function makeVisible(text) {
  return text.replace(/(?![\u200c\u200d])[\p{Z}\p{C}]/gu, (character, at) => { // joiners shape the letters beside them
    const code = character.codePointAt(0);
    if (code === 0x20) return /^\S \S$/.test(text.slice(at - 1, at + 2)) && at ? " " : "␣"; // plain between words
    if (code < 0x20) return String.fromCodePoint(0x2400 + code); // pictures of control characters
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function makeTable(heads, rows) {
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads.map(head => make("th", { scope: "col" }, head)))));
  table.append(make("tbody", {}, ...rows));
  return table;
}

// Return radio buttons in a row, of which one is chosen.
function makeChoice(name, title, labels, chosen, choose) {
  const group = make("fieldset", { class: "choice" }, make("legend", {}, title));
  labels.forEach((label, index) => {
    const input = make("input", { type: "radio", name, value: index });
    input.checked = index === chosen;
    input.addEventListener("change", () => choose(index));
    group.append(make("label", {}, input, make("span", {}, label)));
  });
  return group;
}

// Let arrow keys move the focus between elements, of which one at a time can be reached with the tab key. `move` maps a
// key and the index of the element with the focus to another index.
function addArrowKeys(container, elements, move) {
  elements.forEach((element, index) => { element.tabIndex = index === 0 ? 0 : -1; });
  container.addEventListener("focusin", event => {
    const index = elements.indexOf(event.target);
    if (index >= 0) elements.forEach((element, other) => { element.tabIndex = other === index ? 0 : -1; });
  });
  container.addEventListener("keydown", event => {
    const index = elements.indexOf(event.target);
    const next = index < 0 ? undefined : move(event.key, index);
    if (next === undefined) return;
    event.preventDefault();
    elements[Math.max(0, Math.min(elements.length - 1, next))].focus();
  });
}

function formatNumber(value, digits = 3) {
  return typeof value === "string" ? value : value.toFixed(digits).replace("-", "−");
}

function formatPercent(share) {
  return share > 0 && share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
}

// Matrices. A matrix is an object with rows, columns and their values in one array.

function decodeBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < bytes.length; index++) bytes[index] = binary.charCodeAt(index);
  return bytes;
}

// Return a function of the index of a matrix in a packed array (pack_rows in page.py) that returns this matrix.
function unpack(packed) {
  const bytes = decodeBase64(packed.steps);
  const steps = packed.signed ? new Int8Array(bytes.buffer) : bytes;
  const scales = new Float32Array(decodeBase64(packed.scales).buffer);
  const [rows, columns] = packed.shape.slice(-2);
  return index => {
    const values = new Float32Array(rows * columns);
    for (let row = 0; row < rows; row++) {
      const scale = scales[index * rows + row], from = (index * rows + row) * columns;
      for (let column = 0; column < columns; column++) values[row * columns + column] = steps[from + column] * scale;
    }
    return { rows, columns, values };
  };
}

function average(matrices) {
  const values = new Float32Array(matrices[0].values.length);
  for (const matrix of matrices) matrix.values.forEach((value, index) => { values[index] += value / matrices.length; });
  return { ...matrices[0], values };
}

// Return weights between words: summed over the tokens of a key, averaged over the tokens of a query.
function mergeWords(matrix, rowWords, columnWords) {
  const rows = rowWords.words.length, columns = columnWords.words.length;
  const sizes = new Float32Array(rows);
  for (const row of rowWords.numbers) sizes[row] += 1;
  const values = new Float32Array(rows * columns);
  matrix.values.forEach((value, index) => {
    const row = rowWords.numbers[Math.floor(index / matrix.columns)];
    values[row * columns + columnWords.numbers[index % matrix.columns]] += value / sizes[row];
  });
  return { rows, columns, values };
}

function readColour(name) {
  const [red, green, blue] = getComputedStyle(document.documentElement).getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi);
  return [red, green, blue].map(part => parseInt(part, 16));
}

// Paint one pixel per cell; CSS enlarges them. The size of a value is its opacity, and negative values have a second
// colour. Values below `minimum` are left out.
function paintMatrix(canvas, matrix, { limit = 1, minimum = 0 } = {}) {
  canvas.width = Math.max(1, matrix.columns);
  canvas.height = Math.max(1, matrix.rows);
  const image = new ImageData(canvas.width, canvas.height);
  const positive = readColour("--line0"), negative = readColour("--line1");
  matrix.values.forEach((value, index) => {
    if (Math.abs(value) < minimum) return;
    image.data.set(value < 0 ? negative : positive, 4 * index);
    image.data[4 * index + 3] = 255 * Math.min(1, Math.abs(value) / limit) ** CONTRAST;
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function findLargest(values) {
  return values.reduce((largest, value) => Math.max(largest, Math.abs(value)), 0);
}

function onThemeChange(repaint) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
}

function warnAboutInvalid(section, title, packed) {
  if (packed?.invalid)
    section.append(make("p", { class: "warning" }, `${title}: ${packed.invalid} values are not finite and are shown as 0`));
}
