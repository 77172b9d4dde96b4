// The probability distribution of each token, given the tokens before it; for a classifier, that of its label.

function fillPredictions(section) {
  const { predictions, tokens } = inspection;
  if (!predictions.length) return false;
  if (predictions.length === 1 && !tokens.input) {
    fillLabels(section, predictions[0]);
    return true;
  }
  const most = Math.max(...predictions.map(({ entropy }) => entropy), 1e-9);
  const wrong = predictions.filter(({ rank }) => rank > 1).length;
  const summary = wrong ? `At ${wrong} of ${predictions.length} steps another token is more probable.` : "The most probable token was chosen at every step.";
  const rows = predictions.map((prediction, step) => makeStep(prediction, step, most));
  const table = makeTable(["step", "token", "probability", "rank", "entropy (bits)", "most probable tokens"], rows);
  section.append(make("p", { class: "small" }, summary), makeEntropyChart(predictions, most),
    make("div", { class: "scrolls steps", tabindex: 0, role: "region", "aria-label": "Steps" }, table));
  return true;
}

function toProbability(logp) {
  return typeof logp === "number" ? Math.exp(logp) : 0; // a text stands for minus infinity
}

function makeBar(share, text) {
  return make("span", { class: "meter", style: `--share: ${(100 * share).toFixed(1)}%` }, text);
}

function makeStep({ token, logp, rank, entropy, top }, step, most) {
  const probability = toProbability(logp);
  const alternatives = make("td", { class: "alternatives" });
  if (rank > 1 && top.length)
    alternatives.append(make("span", { class: "badge" }, "the model would have said ", makeToken(top[0][0])), " ");
  for (const [other, share] of top)
    alternatives.append(make("span", { class: other === token ? "alternative own" : "alternative" }, makeToken(other), makeBar(share, formatPercent(share))), " ");
  return make("tr", { class: rank > 1 ? "surprise" : undefined },
    make("td", {}, String(step + 1)), make("th", { scope: "row" }, makeToken(token)),
    make("td", {}, makeBar(probability, formatPercent(probability))), make("td", {}, String(rank)),
    make("td", {}, makeBar(entropy / most, formatNumber(entropy, 2))), alternatives);
}

function makeEntropyChart(predictions, most) {
  const peak = predictions.reduce((best, { entropy }, step) => entropy > predictions[best].entropy ? step : best, 0);
  const label = `Entropy of ${predictions.length} steps, at most ${formatNumber(most, 2)} bits, at step ${peak + 1}`;
  const chart = make("div", { class: "entropy", role: "img", "aria-label": label });
  predictions.forEach(({ token, entropy, rank }, step) => {
    const bar = make("span", { class: rank > 1 ? "bar-column surprise" : "bar-column", title: `step ${step + 1}: ${formatNumber(entropy, 2)} bits` });
    bar.append(make("i", { style: `height: ${(100 * entropy / most).toFixed(1)}%` }), makeToken(token));
    chart.append(bar);
  });
  const legend = make("p", { class: "small" }, `Entropy by step, in bits (at most ${formatNumber(most, 2)}). `,
    make("span", { class: "key positive" }, "the most probable token"), " ", make("span", { class: "key negative" }, "another token was more probable"));
  return make("figure", {}, legend, make("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Entropy by step" }, chart));
}

function fillLabels(section, { token, logp, rank, entropy, top }) {
  section.querySelector("h2").textContent = "Label";
  const labels = top.some(([label]) => label === token) ? top : [...top, [token, toProbability(logp)]];
  const rows = labels.map(([label, share]) => make("tr", { class: label === token ? "own" : undefined },
    make("th", { scope: "row" }, makeToken(label)), make("td", {}, makeBar(share, formatPercent(share)))));
  section.append(make("p", { class: "small" }, `Entropy ${formatNumber(entropy, 2)} bits; rank of `, makeToken(token), `: ${rank}.`),
    make("div", { class: "wide labels" }, makeTable(["label", "probability"], rows)));
}
