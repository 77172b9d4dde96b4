// Searches for the best translation: the results of all of them, and the hypotheses of one as a lattice and as a tree.

const MAX_LATTICE = 3000; // hypotheses; a larger search has only the tree

function fillSearch(section) {
  const { searches } = inspection;
  if (!searches.length) return false;
  const rows = searches.flatMap(({ title, results }) => results.map(({ text, logp, score }, rank) => make("tr", {},
    rank ? make("td") : make("th", { scope: "row" }, title), make("td", {}, String(rank + 1)),
    make("td", { class: "text" }, make("bdi", { class: "long-text" }, text || "(empty)")),
    make("td", {}, formatNumber(logp, 3)), make("td", {}, formatNumber(score, 3)))));
  section.append(make("div", { class: "wide results", tabindex: 0, role: "region", "aria-label": "Results" },
    makeTable(["search", "rank", "text", "log p", "score"], rows)));
  for (const { title, notes } of searches)
    for (const note of notes) section.append(make("p", { class: "small" }, `${title}: ${note}`));
  const traces = searches.filter(({ nodes }) => nodes.length);
  if (!traces.length) return true;
  const area = make("div");
  const open = index => showTrace(area, traces[index]);
  const widest = traces.reduce((best, { nodes }, index) => nodes.length > traces[best].nodes.length ? index : best, 0);
  if (traces.length > 1)
    section.append(make("div", { class: "controls" }, makeChoice("trace", "search", traces.map(({ title }) => title), widest, open)));
  section.append(area);
  open(widest);
  return true;
}

function rankingScore({ score }) {
  return typeof score === "number" ? score : -Number.MAX_VALUE; // a text stands for minus infinity
}

function nameNode({ parent, token }) {
  return parent < 0 && !token ? "start" : token;
}

function showTrace(area, trace) {
  const children = new Map(); // index of a node, or -1 -> indices of its extensions by score, but the best path last
  trace.nodes.forEach((node, index) => {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(index);
  });
  const isBest = index => trace.nodes[index].state === "best";
  for (const siblings of children.values())
    siblings.sort((a, b) => isBest(a) - isBest(b) || rankingScore(trace.nodes[b]) - rankingScore(trace.nodes[a]));
  const counts = trace.nodes.reduce((sum, { state }) => ({ ...sum, [state]: (sum[state] ?? 0) + 1 }), {});
  const caption = make("p", { class: "small" }, `${trace.title}: ${trace.nodes.length} hypotheses. `);
  for (const [state, count] of Object.entries(counts)) caption.append(make("span", { class: `state ${state}` }, `${count} ${state}`), " ");
  const lattice = trace.nodes.filter(({ state }) => state !== "pruned").length <= MAX_LATTICE
    ? makeLattice(trace) : make("p", { class: "small" }, "There are too many hypotheses for a figure; the tree has all of them.");
  const tree = new SearchTree(trace, children);
  const head = make("div", { class: "tree-head", "aria-hidden": "true" }, make("span", { class: "detail" }),
    make("span", { class: "number" }, "log p"), make("span", { class: "number" }, "score"));
  area.replaceChildren(caption, lattice, make("h3", {}, "Tree"),
    make("p", { class: "small" }, "The best path goes straight down; its competitors are indented. Click, or use the arrow keys, to open and close."), head, tree.element);
}

// Return a figure with a column for each step: hypotheses that were kept, the best score first, with lines to the
// hypotheses that they extend. Pruned ones are counted below.
function makeLattice({ title, nodes }) {
  const columns = [];
  nodes.forEach((node, index) => {
    const column = columns[node.step] ??= { kept: [], pruned: 0 };
    if (node.state === "pruned") column.pruned += 1;
    else column.kept.push(index);
  });
  const position = new Map(); // index of a node -> its column and row
  const used = [...columns.keys()].filter(step => columns[step]);
  used.forEach((step, x) => {
    columns[step].kept.sort((a, b) => rankingScore(nodes[b]) - rankingScore(nodes[a])).forEach((index, y) => position.set(index, [x, y]));
  });
  const rows = Math.max(...used.map(step => columns[step].kept.length)) + 1;
  const svg = makeSvg("svg", { viewBox: `0 0 ${used.length} ${rows}`, preserveAspectRatio: "none" });
  const figure = make("div", { class: "lattice", role: "img", style: `--columns: ${used.length}; --rows: ${rows}`,
    "aria-label": `${title}: the hypotheses kept at each of ${used.length} steps. The tree below has the same data.` }, svg);
  for (const [index, [x, y]] of position) {
    const node = nodes[index], from = position.get(node.parent);
    if (from)
      svg.append(makeSvg("path", { class: node.state, d: `M${from[0] + 0.5} ${from[1] + 0.5}C${from[0] + 1} ${from[1] + 0.5} ${x} ${y + 0.5} ${x + 0.5} ${y + 0.5}` }));
    const box = make("span", { class: `box ${node.state}`, style: `--x: ${x}; --y: ${y}` }, makeToken(nameNode(node)));
    box.title = `${nameNode(node)}\n${node.state}, log p ${formatNumber(node.logp)}, score ${formatNumber(node.score)}${node.detail ? `\n${node.detail}` : ""}`;
    box.firstChild.removeAttribute("title");
    figure.append(box);
  }
  used.forEach((step, x) => {
    if (columns[step].pruned)
      figure.append(make("span", { class: "box count", style: `--x: ${x}; --y: ${columns[step].kept.length}` }, `${columns[step].pruned} pruned`));
  });
  return make("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Hypotheses by step" }, figure);
}

// A tree as in the ARIA patterns: one item can be reached with the tab key, arrow keys move, open and close. Children are
// made when they are first shown. The last extension of a hypothesis continues below it without indentation, since the
// best path would otherwise run off to the right.
class SearchTree {
  constructor({ title, nodes }, children) {
    Object.assign(this, { nodes, children });
    this.element = make("ul", { class: "tree scrolls", role: "tree", "aria-label": title });
    this.items = new Map(); // element of an item -> index of its node
    this.append(this.element, -1, 1);
    const first = this.element.firstElementChild;
    if (first) first.tabIndex = 0;
    this.element.addEventListener("keydown", event => this.press(event));
    this.element.addEventListener("focusin", event => {
      for (const item of this.element.querySelectorAll('[tabindex="0"]')) item.tabIndex = -1;
      event.target.tabIndex = 0;
    });
  }

  append(list, parent, level) {
    const siblings = this.children.get(parent) ?? [];
    siblings.forEach((index, position) => {
      const node = this.nodes[index], hasChildren = this.children.has(index);
      const label = `${nameNode(node)}, ${node.state}, log p ${formatNumber(node.logp)}, score ${formatNumber(node.score)}${node.detail ? `, ${node.detail}` : ""}`;
      const row = make("div", { class: `node ${node.state}` }, make("span", { class: "toggle", "aria-hidden": "true" }),
        makeToken(nameNode(node)), make("span", { class: `state ${node.state}` }, node.state),
        make("span", { class: "detail" }, node.detail ?? ""),
        make("span", { class: "number", title: "log p" }, formatNumber(node.logp)), make("span", { class: "number", title: "score" }, formatNumber(node.score)));
      const isMain = position === siblings.length - 1 && node.state === "best";
      const item = make("li", { role: "treeitem", class: isMain ? "main" : undefined, tabindex: -1, "aria-label": label, "aria-level": level,
        "aria-setsize": siblings.length, "aria-posinset": position + 1, "aria-expanded": hasChildren ? "false" : undefined }, row);
      this.items.set(item, index);
      row.addEventListener("click", () => { item.focus(); this.toggle(item); });
      list.append(item);
      if (hasChildren && node.state === "best") this.toggle(item);
    });
  }

  toggle(item) {
    const isOpen = item.getAttribute("aria-expanded") === "true";
    if (!item.hasAttribute("aria-expanded")) return;
    item.setAttribute("aria-expanded", !isOpen);
    let group = item.querySelector(":scope > ul");
    if (!group) {
      group = make("ul", { role: "group" });
      item.append(group);
      this.append(group, this.items.get(item), Number(item.getAttribute("aria-level")) + 1);
    }
    group.hidden = isOpen;
  }

  press(event) {
    const item = event.target, expanded = item.getAttribute("aria-expanded");
    const visible = [...this.element.querySelectorAll("[role=treeitem]")].filter(other => !other.parentElement.closest("ul[hidden]"));
    const at = visible.indexOf(item);
    const actions = {
      ArrowDown: () => visible[at + 1]?.focus(),
      ArrowUp: () => visible[at - 1]?.focus(),
      Home: () => visible[0].focus(),
      End: () => visible.at(-1).focus(),
      ArrowRight: () => expanded === "false" ? this.toggle(item) : expanded === "true" && visible[at + 1].focus(),
      ArrowLeft: () => expanded === "true" ? this.toggle(item) : item.parentElement.closest("[role=treeitem]")?.focus(),
      Enter: () => this.toggle(item),
      " ": () => this.toggle(item),
    };
    if (!(event.key in actions)) return;
    actions[event.key]();
    event.preventDefault();
  }
}
