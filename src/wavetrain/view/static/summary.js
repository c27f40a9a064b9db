// The table above the lanes: one row a timeline, its figures, its ratio to the first and its idle time by cause; and the legend.

import { KIND_LETTERS } from "./model.js";
import { CAUSE_TEXTS } from "./colors.js";
import { KIND_NAMES, formatCount, formatPercent, formatSeconds, shortNumber } from "./words.js";
import { element, swatch } from "./dom.js";

/** The letter by which a timeline is called: A, B, … */
export function letterOf(at) {
  return String.fromCharCode(65 + at);
}

/** How much longer or shorter than the first: "−17.2 % (0.828×)". */
export function ratioText(makespan, base) {
  if (!(base > 0)) return "–";
  const ratio = makespan / base;
  const change = 100 * (ratio - 1);
  if (Math.abs(change) < 0.05) return "equal (1×)";
  return `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(1)} % (${shortNumber(ratio, 3)}×)`;
}

export function renderSummary(table, models, palette) {
  const many = models.length > 1;
  const headings = ["schedule", "source", "ranks", "micro-batches", "waves", "makespan", many ? "against A" : null, "bubble",
    "peak activations", "messages", "idle time by cause, all ranks"].filter((heading) => heading !== null);
  const longest = Math.max(1e-9, ...models.map((model) => model.bubble));
  table.replaceChildren(
    element("thead", {}, element("tr", {}, ...headings.map((h) => element("th", { scope: "col" }, h)))),
    element("tbody", {}, ...models.map((model, at) => summaryRow(model, at, models, palette, longest))),
  );
}

function summaryRow(model, at, models, palette, longest) {
  const many = models.length > 1;
  const peak = Math.max(0, ...model.peaks);
  const perRank = `by rank: ${model.peaks.map((p) => shortNumber(p, 3)).join(", ")} micro-batches of a rank's share`;
  const name = element("th", { scope: "row", class: "name" });
  if (many) name.append(element("span", { class: "letter" }, letterOf(at)));
  name.append(element("span", { class: "name-text", title: model.name }, model.name));
  const figures = [
    [element("span", { class: `source ${model.source}` }, model.source)],
    [String(model.ranks)],
    [String(model.microBatches)],
    [model.waves === null ? "–" : String(model.waves)],
    [element("strong", {}, formatSeconds(model.makespan)), element("span", { class: "of" }, ` ideal ${formatSeconds(model.ideal)}`)],
    ...(many ? [[at === 0 ? "–" : ratioText(model.makespan, models[0].makespan)]] : []),
    [element("strong", {}, formatPercent(model.bubble))],
    [element("span", { title: perRank }, shortNumber(peak, 4))],
    [formatCount(model.messages.count)],
  ];
  const row = element("tr", { "data-timeline": at }, name);
  row.append(...figures.map((cell) => element("td", {}, ...cell)));
  if (many && at > 0) {
    const better = model.makespan < models[0].makespan * 0.9995;
    const worse = model.makespan > models[0].makespan * 1.0005;
    row.children[6].classList.add("ratio", better ? "better" : worse ? "worse" : "equal");
  }
  row.append(element("td", { class: "idle" }, idleBar(model, palette, longest)));
  return row;
}

/** A bar as long as the bubble, its parts the causes. */
function idleBar(model, palette, longest) {
  const idle = model.idleByCause();
  const all = model.makespan * model.ranks;
  const share = (value) => (all > 0 ? value / all : 0);
  const parts = model.causes.map((cause, at) => ({ cause, at, share: share(idle[at]) })).filter((part) => part.share > 5e-5);
  const words = parts.map((part) => `${part.cause} ${formatPercent(part.share)}`);
  const bar = element("div", { class: "bar", role: "img", "aria-label": `idle: ${words.join(", ") || "none"}` });
  for (const part of parts) {
    const piece = element("span", { class: "piece", title: `${part.cause} ${formatPercent(part.share)}: ${CAUSE_TEXTS[part.cause]}` });
    piece.style.background = palette.causes[part.at];
    piece.style.width = `${(100 * part.share) / longest}%`;
    bar.append(piece);
  }
  const labels = element("div", { class: "causes" });
  for (const part of parts) {
    labels.append(element("span", { title: CAUSE_TEXTS[part.cause] }, swatch(palette.causes[part.at]), `${part.cause} ${formatPercent(part.share)}`));
  }
  if (!parts.length) labels.append("none");
  return element("div", { class: "idle-cell" }, bar, labels);
}

export function renderLegend(list, models, palette) {
  const kinds = [0, 1, 2, 3].filter((kind) => models.some((model) => model.usedKinds.includes(kind)));
  const chunks = palette.fills[0].length;
  const items = kinds.map((kind) => {
    const shades = element("span", { class: "shades", "aria-hidden": "true" });
    for (const fill of palette.fills[kind]) shades.append(swatch(fill.css));
    return element("li", {}, shades, element("b", {}, KIND_LETTERS[kind]), ` ${KIND_NAMES[kind]}`);
  });
  if (chunks > 1) items.push(element("li", { class: "note" }, "shade: first to last stage of a rank"));
  list.replaceChildren(...items);
}
