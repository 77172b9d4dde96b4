// The phrase pairs of a phrase-based system: source and target with coloured spans and bands between them, and features.

const COLOURS = 8; // --line0 to --line7

function fillPhrases(section) {
  const { phrases } = inspection;
  if (!phrases.length) return false;
  const marked = phrases.map(() => []); // the elements of each phrase
  const makeSpan = (phrase, index, text) => {
    const span = make("span", { class: "phrase", style: `--c: var(--line${index % COLOURS})` }, makeToken(text));
    marked[index].push(span);
    return span;
  };
  const source = make("div", { class: "phrase-row" }, ...listSource(makeSpan));
  const target = make("div", { class: "phrase-row" }, ...phrases.map((phrase, index) => makeSpan(phrase, index, phrase.target)));
  const bands = makeSvg("svg", { "aria-hidden": "true" });
  const figure = make("div", { class: "phrase-figure" }, source, bands, target);
  section.append(make("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Source above, target below" }, figure));
  const rows = makePhraseTable(section, marked);
  marked.forEach((elements, index) => [...elements, rows[index]].forEach(element => {
    element.addEventListener("mouseenter", () => select(index));
    element.addEventListener("mouseleave", () => select(null));
  }));
  function select(chosen) {
    marked.forEach((elements, index) => [...elements, rows[index], bands.children[index]].forEach(element =>
      element.classList.toggle("selected", index === chosen)));
    figure.classList.toggle("selecting", chosen !== null);
  }
  new ResizeObserver(() => drawBands(bands, marked)).observe(figure);
  return true;
}

// Return the phrases in source order, with the words between them that no phrase covers.
function listSource(makeSpan) {
  const words = inspection.tokens.source?.words ?? [];
  const order = inspection.phrases.map((phrase, index) => ({ phrase, index })).sort((a, b) => a.phrase.source_span[0] - b.phrase.source_span[0]);
  const elements = [];
  let end = 0;
  for (const { phrase, index } of order) {
    elements.push(...words.slice(end, phrase.source_span[0]).map(makeToken), makeSpan(phrase, index, phrase.source));
    end = phrase.source_span[1];
  }
  return [...elements, ...words.slice(end).map(makeToken)];
}

function drawBands(svg, marked) {
  const origin = svg.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${origin.width} ${origin.height}`);
  svg.replaceChildren(...marked.map(([above, below], index) => {
    const from = above.getBoundingClientRect(), to = below.getBoundingClientRect(), middle = origin.height / 2;
    const [a, b, c, d] = [from.left, from.right, to.right, to.left].map(x => (x - origin.left).toFixed(1));
    const path = `M${a} 0L${b} 0C${b} ${middle} ${c} ${middle} ${c} ${origin.height}L${d} ${origin.height}C${d} ${middle} ${a} ${middle} ${a} 0Z`;
    return makeSvg("path", { d: path, style: `fill: var(--line${index % COLOURS})` });
  }));
}

function makePhraseTable(section, marked) {
  const { phrases } = inspection;
  const names = [...new Set(phrases.flatMap(phrase => Object.keys(phrase.features)))];
  const rows = phrases.map((phrase, index) => make("tr", {},
    ...[phrase.source, phrase.target].map((text, column) => make(column ? "td" : "th", { scope: column ? undefined : "row", class: "text" },
      make("span", { class: "pair", style: `--c: var(--line${index % COLOURS})` }, makeToken(text)))),
    make("td", {}, `${phrase.source_span[0] + 1}–${phrase.source_span[1]}`),
    ...names.map(name => make("td", {}, name in phrase.features ? formatNumber(phrase.features[name]) : ""))));
  section.append(make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Features of the phrases" },
    makeTable(["source", "target", "source words", ...names], rows)));
  return rows;
}
