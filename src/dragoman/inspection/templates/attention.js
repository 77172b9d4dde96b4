// The attention weights of all layers and heads: thumbnails of all, and one head as lines between tokens and as a matrix.

const MEAN = -1; // in place of the index of a head
const LINE_LEVELS = 12; // lines of about the same weight are one SVG path, since there may be tens of thousands
const LISTED = 6; // largest weights in the text about a token

function fillAttention(section) {
  if (!inspection.attentions.length) return false;
  for (const { title, weight } of inspection.attentions) warnAboutInvalid(section, title, weight);
  new AttentionView(section);
  return true;
}

class AttentionView {
  constructor(section) {
    const lists = Object.values(inspection.tokens);
    this.canMerge = lists.some(list => list.words.length < list.tokens.length);
    this.merged = false;
    this.minimum = 0.05;
    this.selected = { query: null, key: null }; // hovered, focused or pinned; a cell has both
    this.pinned = null;
    this.overview = make("div", { class: "overview" });
    this.readout = make("p", { class: "readout", role: "status" });
    this.lines = new LinesView(this);
    this.matrix = new MatrixView(this);
    const head = make("div", { class: "head" }, this.readout, make("div", { class: "views" }, this.lines.element, this.matrix.element));
    section.append(this.makeControls(), make("div", { class: "attention" }, this.overview, head));
    section.addEventListener("keydown", event => { if (event.key === "Escape") this.unpin(); });
    onThemeChange(() => { this.paintOverview(); this.matrix.paint(); });
    this.openPart(Math.max(0, inspection.attentions.findIndex(map => map.name === "cross")));
  }

  makeControls() {
    const maps = inspection.attentions, part = Math.max(0, maps.findIndex(map => map.name === "cross"));
    this.layerSelect = make("select");
    this.headSelect = make("select");
    const reopen = () => this.openHead(Number(this.layerSelect.value), Number(this.headSelect.value));
    this.layerSelect.addEventListener("change", reopen);
    this.headSelect.addEventListener("change", reopen);
    const slider = make("input", { type: "range", min: 0, max: 1, step: 0.01, value: this.minimum });
    const value = make("output", {}, this.minimum.toFixed(2));
    slider.addEventListener("input", () => {
      this.minimum = Number(slider.value);
      value.textContent = this.minimum.toFixed(2);
      this.lines.draw();
      this.matrix.paint();
      this.select(this.selected.query, this.selected.key);
    });
    const merge = make("input", { type: "checkbox" });
    merge.addEventListener("change", () => { this.merged = merge.checked; this.refresh(); });
    const controls = make("div", { class: "controls" },
      makeChoice("part", "part", maps.map(map => map.title), part, index => this.openPart(index)),
      make("label", {}, "layer ", this.layerSelect), make("label", {}, "head ", this.headSelect),
      make("label", { class: "slider" }, "weights from ", slider, value));
    if (this.canMerge) controls.append(make("label", {}, merge, " merge subwords into words"));
    return controls;
  }

  openPart(index) {
    this.map = inspection.attentions[index];
    this.map.unpacked ??= unpack(this.map.weight);
    [this.layers, this.heads] = this.map.weight.shape;
    const best = this.map.best_layer;
    const names = Array.from({ length: this.layers }, (_, layer) => `${layer + 1}${layer === best ? " (word alignment)" : ""}`);
    this.layerSelect.replaceChildren(...names.map((name, layer) => make("option", { value: layer }, name)));
    const heads = Array.from({ length: this.heads }, (_, head) => make("option", { value: head }, String(head + 1)));
    this.headSelect.replaceChildren(make("option", { value: MEAN }, "mean of heads"), ...heads);
    this.layer = best ?? this.layers - 1;
    this.head = MEAN;
    this.refresh();
  }

  refresh() {
    this.buildOverview();
    this.openHead(this.layer, this.head);
  }

  // Return the labels of the queries or keys: tokens, or words if subwords are merged.
  labels(side) {
    const list = inspection.tokens[this.map[side]];
    return this.merged ? list.words : list.tokens;
  }

  weights(layer, head) {
    const matrix = index => this.map.unpacked(layer * this.heads + index);
    const tokens = head === MEAN ? average(Array.from({ length: this.heads }, (_, index) => matrix(index))) : matrix(head);
    if (!this.merged) return tokens;
    return mergeWords(tokens, inspection.tokens[this.map.queries], inspection.tokens[this.map.keys]);
  }

  buildOverview() {
    const columns = this.heads > 1 ? [MEAN, ...Array(this.heads).keys()] : [0];
    const grid = make("div", { class: "thumbnails", role: "group", "aria-label": "All layers and heads", style: `--heads: ${columns.length}` });
    grid.append(make("span"), ...columns.map(head => make("span", { class: "small" }, head === MEAN ? "mean" : String(head + 1))));
    this.thumbnails = [];
    for (let layer = 0; layer < this.layers; layer++) {
      grid.append(make("span", { class: "small row" }, String(layer + 1)));
      for (const head of columns) {
        const label = `layer ${layer + 1}, ${head === MEAN ? "mean of heads" : `head ${head + 1}`}`;
        const button = make("button", { type: "button", class: "thumbnail", "aria-label": label, title: label }, make("canvas"));
        button.addEventListener("click", () => this.openHead(layer, head));
        this.thumbnails.push({ button, layer, head });
        grid.append(button);
      }
    }
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns.length, ArrowDown: columns.length, Home: -Infinity, End: Infinity };
    addArrowKeys(grid, this.thumbnails.map(thumbnail => thumbnail.button), (key, index) => {
      const next = index + steps[key];
      return Number.isNaN(next) ? undefined : Math.abs(next) === Infinity || (next >= 0 && next < this.thumbnails.length) ? next : index;
    });
    const caption = `rows: ${this.layers === 1 ? "the layer" : "layers"}; columns: ${this.heads === 1 ? "the head" : "heads"}`;
    this.overview.replaceChildren(make("h3", {}, "All heads"), make("p", { class: "small" }, caption), grid);
    this.paintOverview();
  }

  paintOverview() {
    for (const { button, layer, head } of this.thumbnails) {
      const canvas = button.firstChild;
      paintMatrix(canvas, this.weights(layer, head));
      canvas.classList.toggle("shrunk", canvas.width > 64 || canvas.height > 64);
    }
  }

  openHead(layer, head) {
    Object.assign(this, { layer, head });
    this.layerSelect.value = layer;
    this.headSelect.value = this.heads > 1 ? head : 0;
    if (this.heads === 1) this.head = 0;
    this.opened = this.weights(layer, this.head);
    for (const thumbnail of this.thumbnails)
      thumbnail.button.setAttribute("aria-pressed", thumbnail.layer === layer && thumbnail.head === this.head);
    this.pinned = null;
    this.lines.build();
    this.matrix.build();
    this.select(null, null);
  }

  weight(query, key) {
    return this.opened.values[query * this.opened.columns + key];
  }

  // Show the weights of a token (the other argument is null) or of a cell, unless something is pinned.
  hover(query, key) {
    if (!this.pinned) this.select(query, key);
  }

  togglePin(query, key) {
    const same = this.pinned && this.pinned.query === query && this.pinned.key === key;
    this.pinned = same ? null : { query, key };
    this.select(query, key);
  }

  unpin() {
    this.pinned = null;
    this.select(null, null);
  }

  select(query, key) {
    this.selected = { query, key };
    this.lines.highlight();
    this.matrix.highlight();
    this.describe(query, key);
  }

  describe(query, key) {
    const queries = this.labels("queries"), keys = this.labels("keys");
    const where = `Layer ${this.layer + 1}, ${this.head === MEAN ? "mean of heads" : `head ${this.head + 1}`}. `;
    if (query === null && key === null) {
      this.readout.replaceChildren(make("b", {}, where), "Point at a token or a cell to see its weights; click or press Enter to keep it selected.");
    } else if (query !== null && key !== null) {
      this.readout.replaceChildren(makeToken(queries[query]), ...this.namePrediction(query), " → ", makeToken(keys[key]), " ", make("b", {}, formatNumber(this.weight(query, key))));
    } else {
      const others = query !== null ? keys : queries;
      const weights = others.map((_, other) => query !== null ? this.weight(query, other) : this.weight(other, key));
      const largest = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, LISTED).filter(other => weights[other] > 0);
      if (query !== null) this.readout.replaceChildren(makeToken(queries[query]), ...this.namePrediction(query), " attends to ");
      else this.readout.replaceChildren(makeToken(keys[key]), " is attended to by ");
      largest.forEach((other, rank) => this.readout.append(rank ? ", " : "", makeToken(others[other]), " ", make("b", {}, formatNumber(weights[other]))));
      if (largest.length < others.length) this.readout.append(" …");
    }
    if (this.pinned) this.readout.append(make("span", { class: "badge" }, "pinned, Escape to release"));
  }

  // Return what the decoder predicts at an input: attention at an input serves the next token.
  namePrediction(query) {
    const isInput = this.map.queries === "input" && !this.merged && query < (inspection.tokens.target?.tokens.length ?? 0);
    return isInput ? [" (predicts ", makeToken(inspection.tokens.target.tokens[query]), ")"] : [];
  }
}

// Two columns of tokens, with lines between them.
class LinesView {
  constructor(view) {
    this.view = view;
    this.element = make("div", { class: "lines scrolls", role: "group", "aria-label": "Attention as lines between tokens" });
  }

  build() {
    const { view } = this;
    this.buttons = { queries: [], keys: [] };
    const columns = ["queries", "keys"].map(side => {
      const title = LIST_TITLES[view.map[side]] ?? view.map[side];
      const column = make("div", { class: `column ${side}`, role: "group", "aria-label": `${side}: ${title}` });
      view.labels(side).forEach((label, index) => {
        const button = make("button", { type: "button", "aria-pressed": "false" }, makeToken(label));
        const [query, key] = side === "queries" ? [index, null] : [null, index];
        button.addEventListener("mouseenter", () => view.hover(query, key));
        button.addEventListener("mouseleave", () => view.hover(null, null));
        button.addEventListener("focus", () => view.hover(query, key));
        button.addEventListener("click", () => view.togglePin(query, key));
        column.append(button);
        this.buttons[side].push(button);
      });
      addArrowKeys(column, this.buttons[side], (name, index) => this.move(side, name, index));
      return column;
    });
    const rows = Math.max(view.opened.rows, view.opened.columns);
    this.base = makeSvg("g", { class: "base" });
    this.overlay = makeSvg("g", { class: "overlay" });
    this.svg = makeSvg("svg", { viewBox: `0 0 100 ${rows}`, preserveAspectRatio: "none", "aria-hidden": "true", style: `--rows: ${rows}` }, this.base, this.overlay);
    const titles = ["queries", "keys"].map(side => make("span", { class: `small title ${side}` }, (LIST_TITLES[view.map[side]] ?? view.map[side]) + (side === "queries" ? " →" : "")));
    this.element.replaceChildren(titles[0], make("span", { class: "title" }), titles[1], columns[0], this.svg, columns[1]);
    this.draw();
  }

  move(side, key, index) {
    const steps = { ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity };
    if (key in steps) return index + steps[key];
    if ((key === "ArrowRight" && side === "queries") || (key === "ArrowLeft" && side === "keys")) {
      const other = this.buttons[side === "queries" ? "keys" : "queries"];
      other[Math.min(index, other.length - 1)]?.focus();
    }
    return undefined;
  }

  curve(query, key) {
    return `M0 ${query + 0.5}C45 ${query + 0.5} 55 ${key + 0.5} 100 ${key + 0.5}`;
  }

  draw() {
    const { rows, columns, values } = this.view.opened;
    const curves = Array.from({ length: LINE_LEVELS }, () => []);
    for (let query = 0; query < rows; query++) {
      for (let key = 0; key < columns; key++) {
        const weight = values[query * columns + key];
        if (weight > 0 && weight >= this.view.minimum)
          curves[Math.min(LINE_LEVELS - 1, Math.floor(weight * LINE_LEVELS))].push(this.curve(query, key));
      }
    }
    this.base.replaceChildren(...curves.flatMap((paths, level) => paths.length
      ? [this.makePath(paths.join(""), (level + 0.5) / LINE_LEVELS, paths.length)] : []));
  }

  makePath(d, weight, count) {
    const style = `stroke-width: ${(0.6 + 5 * weight).toFixed(2)}px; --strength: ${(weight ** 0.8).toFixed(3)}`;
    return makeSvg("path", { d, style, "data-count": count });
  }

  highlight() {
    const { view } = this, { query, key } = view.selected, { rows, columns } = view.opened;
    const isSelected = query !== null || key !== null;
    this.element.classList.toggle("selecting", isSelected);
    const pairs = [];
    if (isSelected)
      for (let q = query ?? 0; q < (query === null ? rows : query + 1); q++)
        for (let k = key ?? 0; k < (key === null ? columns : key + 1); k++) pairs.push([q, k, view.weight(q, k)]);
    const shown = pairs.filter(([, , weight]) => weight > 0 && weight >= view.minimum);
    this.overlay.replaceChildren(...shown.map(([q, k, weight]) => this.makePath(this.curve(q, k), weight, 1)));
    for (const side of ["queries", "keys"]) {
      const own = side === "queries" ? query : key;
      this.buttons[side].forEach((button, index) => {
        button.classList.toggle("selected", index === own);
        button.setAttribute("aria-pressed", Boolean(view.pinned) && index === own);
        button.style.removeProperty("--weight");
      });
    }
    for (const [q, k, weight] of pairs) {
      if (query === null) this.buttons.queries[q].style.setProperty("--weight", weight.toFixed(3));
      if (key === null) this.buttons.keys[k].style.setProperty("--weight", weight.toFixed(3));
    }
  }
}

// A matrix with a row for each query and a column for each key.
class MatrixView {
  constructor(view) {
    this.view = view;
    this.element = make("div", { class: "matrix scrolls" });
  }

  build() {
    const { view } = this, { rows, columns } = view.opened;
    this.canvas = make("canvas");
    this.cursor = make("div", { class: "cursor", hidden: "" });
    // A table with a cell for each weight would have 40,000 elements for 200 tokens. Instead, arrow keys move a cursor,
    // and the text above the matrix (role "status") has the tokens and the weight of the cell.
    this.area = make("div", {
      class: "area", tabindex: 0, role: "application", "aria-roledescription": "matrix",
      "aria-label": `Attention weights, ${rows} queries by ${columns} keys. Arrow keys move between cells, Enter pins a cell, Escape releases it.`,
    }, this.canvas, this.cursor);
    this.labels = { queries: [], keys: [] };
    const bars = ["queries", "keys"].map(side => {
      const bar = make("div", { class: `names ${side}`, "aria-hidden": "true" });
      view.labels(side).forEach((label, index) => {
        const name = make("span", {}, makeToken(label));
        name.addEventListener("mouseenter", () => side === "queries" ? view.hover(index, null) : view.hover(null, index));
        name.addEventListener("mouseleave", () => view.hover(null, null));
        this.labels[side].push(name);
        bar.append(name);
      });
      return bar;
    });
    this.element.style.setProperty("--rows", rows);
    this.element.style.setProperty("--columns", columns);
    this.element.classList.toggle("dense", Math.max(rows, columns) > 48);
    this.element.replaceChildren(make("div", { class: "corner" }), bars[1], bars[0], this.area);
    this.listen();
    this.paint();
  }

  listen() {
    const { view } = this;
    const cellAt = event => {
      const box = this.canvas.getBoundingClientRect();
      const query = Math.floor((event.clientY - box.top) / box.height * view.opened.rows);
      const key = Math.floor((event.clientX - box.left) / box.width * view.opened.columns);
      return [Math.max(0, Math.min(view.opened.rows - 1, query)), Math.max(0, Math.min(view.opened.columns - 1, key))];
    };
    this.area.addEventListener("mousemove", event => view.hover(...cellAt(event)));
    this.area.addEventListener("mouseleave", () => view.hover(null, null));
    this.area.addEventListener("click", event => view.togglePin(...cellAt(event)));
    this.area.addEventListener("focus", () => { if (view.selected.query === null || view.selected.key === null) view.hover(view.selected.query ?? 0, view.selected.key ?? 0); });
    this.area.addEventListener("keydown", event => this.press(event));
  }

  press(event) {
    const { view } = this, { rows, columns } = view.opened;
    const query = view.selected.query ?? 0, key = view.selected.key ?? 0;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -columns], End: [0, columns], PageUp: [-10, 0], PageDown: [10, 0] };
    if (event.key in moves) {
      const [down, right] = moves[event.key];
      view.pinned = null;
      view.select(Math.max(0, Math.min(rows - 1, query + down)), Math.max(0, Math.min(columns - 1, key + right)));
      this.cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else if (event.key === "Enter" || event.key === " ") {
      view.togglePin(query, key);
    } else {
      return;
    }
    event.preventDefault();
  }

  paint() {
    paintMatrix(this.canvas, this.view.opened, { minimum: this.view.minimum });
  }

  highlight() {
    const { query, key } = this.view.selected, { rows, columns } = this.view.opened;
    this.labels.queries.forEach((name, index) => name.classList.toggle("selected", index === query));
    this.labels.keys.forEach((name, index) => name.classList.toggle("selected", index === key));
    this.cursor.hidden = query === null && key === null;
    this.cursor.style.setProperty("--row", query ?? 0);
    this.cursor.style.setProperty("--column", key ?? 0);
    this.cursor.style.setProperty("--height", query === null ? rows : 1);
    this.cursor.style.setProperty("--width", key === null ? columns : 1);
  }
}
