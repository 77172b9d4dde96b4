// How much one predicted token depends on each input token: a table with a column for each method, beside attention.

function fillAttribution(section) {
  const { attributions, attentions, tokens } = inspection;
  if (!attributions.length) return false;
  const methods = attributions.map(({ title, value, prefix }) =>
    ({ title, value: value && unpack(value)(0), prefix: prefix && unpack(prefix)(0) }));
  for (const { title, value, prefix } of attributions) [value, prefix].forEach(packed => warnAboutInvalid(section, title, packed));
  const cross = attentions.find(map => map.name === "cross");
  if (cross && methods.some(method => method.value)) methods.push(averageHeads(cross));
  const first = methods[0].value ?? methods[0].prefix;
  const targets = tokens.target?.tokens.length === first.rows ? tokens.target.tokens : inspection.predictions.map(({ token }) => token);
  const groups = [];
  if (methods.some(method => method.value)) groups.push({ title: LIST_TITLES.source, part: "value", tokens: tokens.source.tokens });
  if (methods.some(method => method.prefix)) groups.push({ title: LIST_TITLES.input, part: "prefix", tokens: tokens.input.tokens });
  new AttributionView(section, methods, groups, targets);
  return true;
}

function averageHeads(map) {
  const [layers, heads] = map.weight.shape, layer = map.best_layer ?? layers - 1;
  map.unpacked ??= unpack(map.weight);
  const matrices = Array.from({ length: heads }, (_, head) => map.unpacked(layer * heads + head));
  return { title: `attention, layer ${layer + 1}, mean of heads`, value: average(matrices), prefix: null };
}

class AttributionView {
  constructor(section, methods, groups, targets) {
    Object.assign(this, { methods, groups, targets });
    const legend = make("p", { class: "small" }, "How much the chosen token depends on each input token. ",
      make("span", { class: "key positive" }, "in favour"), " ", make("span", { class: "key negative" }, "against"),
      "Bars are relative to the largest value of their column.");
    this.buttons = targets.map((target, row) => {
      const button = make("button", { type: "button", "aria-pressed": "false" }, makeToken(target));
      button.addEventListener("click", () => this.choose(row));
      return button;
    });
    const chooser = make("div", { class: "chooser", role: "group", "aria-label": "Predicted token" }, ...this.buttons);
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity };
    addArrowKeys(chooser, this.buttons, (key, row) => key in steps ? row + steps[key] : undefined);
    chooser.addEventListener("focusin", event => this.choose(this.buttons.indexOf(event.target)));
    this.body = make("div", { class: "scrolls attributions", tabindex: 0, role: "region", "aria-label": "Attributions by method" });
    section.append(legend, make("p", {}, "predicted token"), chooser, this.body);
    this.buildTable();
    onThemeChange(() => this.paint());
    this.paint();
    this.choose(0);
  }

  buildTable() {
    const heads = this.methods.map(method => {
      const matrix = method.value ?? method.prefix;
      method.canvas = make("canvas", { title: "rows: predicted tokens; columns: input tokens" });
      method.marker = make("div", { class: "cursor" });
      method.map = make("div", { class: "map", style: `--rows: ${matrix.rows}; --columns: 1` }, method.canvas, method.marker);
      method.map.addEventListener("click", event => {
        const box = method.map.getBoundingClientRect();
        this.choose(Math.min(matrix.rows - 1, Math.floor((event.clientY - box.top) / box.height * matrix.rows)));
      });
      return make("th", { scope: "col" }, make("span", {}, method.title), method.map);
    });
    const table = make("table", {}, make("thead", {}, make("tr", {}, make("td"), ...heads)));
    this.cells = [];
    for (const { title, part, tokens } of this.groups) {
      const body = make("tbody", {}, make("tr", {}, make("th", { scope: "rowgroup", colspan: this.methods.length + 1, class: "group" }, title)));
      tokens.forEach((token, column) => {
        const cells = this.methods.map(() => make("td", { class: "signed" }));
        this.cells.push({ part, column, cells });
        body.append(make("tr", {}, make("th", { scope: "row" }, makeToken(token)), ...cells));
      });
      table.append(body);
    }
    this.body.append(table);
  }

  paint() {
    for (const { canvas, value, prefix } of this.methods) {
      const matrix = value ?? prefix;
      paintMatrix(canvas, matrix, { limit: findLargest(matrix.values) || 1 });
    }
  }

  choose(row) {
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", index === row));
    this.methods.forEach((method, index) => {
      method.marker.style.setProperty("--row", row);
      const valueOf = ({ part, column }) => method[part] && method[part].values[row * method[part].columns + column];
      const values = this.cells.map(valueOf);
      const limit = findLargest(values.filter(value => value !== null));
      const digits = Math.max(0, Math.min(9, 2 - Math.floor(Math.log10(limit || 1))));
      this.cells.forEach(({ cells }, position) => {
        const cell = cells[index], value = values[position];
        cell.textContent = value === null ? "" : formatNumber(value, digits);
        cell.style.setProperty("--share", `${value === null || !limit ? 0 : 100 * Math.abs(value) / limit}%`);
        cell.classList.toggle("negative", value < 0);
      });
    });
  }
}
