// The page: data in, lanes out. Wires the parts together and owns what is shown, hovered and selected.
//
// `window.wavetrainView` is a small stable interface for tests and automation:
//   state()                                what is shown; see Page.describe
//   locate(at, kind, stage, microBatch)    where an action is on the screen: {x, y, width}, its middle in client pixels; or null
//   settled()                              a promise, kept once nothing moves any more and the last change has been drawn
//   frames                                 milliseconds that each of the last 1000 drawings took

import { KIND, Model } from "./model.js";
import { CAUSE_TEXTS, palette } from "./colors.js";
import { LEFT, TOP, layOut, rowAt, rowOf } from "./layout.js";
import { Painter } from "./painter.js";
import { Viewport } from "./viewport.js";
import { actionDetails, idleDetails, rankDetails } from "./details.js";
import { detailsList, element } from "./dom.js";
import { renderLegend, renderSummary } from "./summary.js";
import { KEYS, listenToKeys, listenToPointer } from "./controls.js";
import { Panel } from "./panel.js";
import { formatSeconds } from "./words.js";
import { readAddress, writeAddress } from "./address.js";

const FRAMES_KEPT = 1000;
const ADDRESS_MS = 200;
const SHOWN_AT_FIRST = "messages";
const HIT_PIXELS = 2;
const byId = (id) => document.getElementById(id);

class Page {
  frames = [];
  #models = [];
  #show = { critical: false, messages: true, memory: false };
  #hover = null; // {at, rank, id (-1: no action), t}
  #selected = null; // {at, id}
  #range = null; // {t0, t1}, while being marked
  #state = "current";
  #generation = 0;
  #pending = false;
  #layout = null;
  #palette = null;
  #panel = null;
  #addressTimer = 0;
  #scroller = byId("scroller");
  #canvas = byId("canvas");
  #tooltip = byId("tooltip");
  #dark = window.matchMedia("(prefers-color-scheme: dark)");
  #painter = new Painter(this.#canvas);
  #viewport = new Viewport(() => {
    this.#redraw();
    this.#keepAddress();
  });

  start() {
    const address = readAddress();
    if (address.show) for (const what of Object.keys(this.#show)) this.#show[what] = address.show.includes(what);
    this.#wireButtons();
    listenToKeys(this);
    listenToPointer(this.#canvas, this);
    this.setTimelines(JSON.parse(byId("data").textContent).timelines);
    if (address.time) this.#viewport.show(...address.time);
    const live = JSON.parse(byId("live").textContent);
    if (live) this.#startPanel(live, address.settings);
    this.#dark.addEventListener("change", () => this.#restyle());
    new ResizeObserver(() => this.#relayout()).observe(this.#scroller);
    this.#scroller.addEventListener("scroll", () => this.#redraw());
    window.addEventListener("hashchange", () => location.reload()); // someone pasted another link: start over from it
  }

  setTimelines(payloads) {
    this.#models = payloads.map((payload) => new Model(payload));
    this.#generation += 1;
    this.leave();
    this.#select(null);
    byId("empty").hidden = this.#models.length > 0;
    document.title = `${this.#models.map((model) => model.name).join(" vs ") || "timelines"} · wavetrain`;
    const words = this.#models.map((model) => `${model.name}, ${model.ranks} ranks, ${formatSeconds(model.makespan)}`);
    this.#canvas.setAttribute("aria-label", `Timeline of ${words.join("; and of ") || "nothing yet"}. Press ? for its keys.`);
    this.#restyle();
    this.#relayout();
    this.#viewport.setLength(Math.max(0, ...this.#models.map((model) => model.makespan)));
  }

  /** What is shown, as plain data. */
  describe() {
    const { t0, t1, whole } = this.#viewport;
    return {
      state: this.#state, t0, t1, whole, show: { ...this.#show }, selected: this.#selected, scroll: this.#scroller.scrollTop,
      timelines: this.#models.map((model) => ({ name: model.name, makespan: model.makespan, actions: model.numActions })),
    };
  }

  locate(at, kind, stage, microBatch) {
    const model = this.#models[at];
    const id = model ? model.find(KIND[kind], stage, microBatch) : -1;
    if (id < 0) return null;
    const action = model.action(id);
    const row = rowOf(this.#layout, at, action.rank);
    const box = this.#canvas.getBoundingClientRect();
    const [x0, x1] = [this.#x(action.start), this.#x(action.end)];
    return { x: box.left + (x0 + x1) / 2, y: box.top + TOP + row.y - this.#scroller.scrollTop + row.lane / 2, width: x1 - x0 };
  }

  async settled() {
    do await new Promise((resolve) => requestAnimationFrame(resolve));
    while (this.#viewport.moving || this.#pending);
  }

  // What pointer and keys ask for (see controls.js).

  zoom(factor) {
    const { t0, t1 } = this.#viewport;
    const action = this.#selectedAction();
    const inView = action && action.end > t0 && action.start < t1;
    this.#viewport.zoom(factor, inView ? (action.start + action.end) / 2 : (t0 + t1) / 2, true);
  }

  zoomAt(factor, x) {
    this.#viewport.zoom(factor, this.#time(x));
  }

  pan(fraction) {
    this.#viewport.pan(Math.max(-1e7, Math.min(1e7, fraction)), true);
  }

  drag(pixels) {
    this.#viewport.pan(-pixels / this.#layout.plot.width);
  }

  scroll(pixels) {
    this.#scroller.scrollTop += pixels;
  }

  fit() {
    this.#viewport.fit(true);
  }

  overview(x) {
    const { t0, t1, whole } = this.#viewport;
    const middle = ((x - LEFT) / this.#layout.plot.width) * whole;
    this.#viewport.show(middle - (t1 - t0) / 2, middle + (t1 - t0) / 2);
  }

  /** Mark a stretch of time; when done, zoom to it. */
  range(x0, x1, done = null) {
    const [t0, t1] = [this.#time(Math.min(x0, x1)), this.#time(Math.max(x0, x1))];
    this.#range = done === null ? { t0, t1 } : null;
    if (done) this.#viewport.show(t0, t1, true);
    this.#redraw();
  }

  toggle(what) {
    this.#show[what] = !this.#show[what];
    byId(`toggle-${what}`).setAttribute("aria-pressed", String(this.#show[what]));
    this.#relayout();
    this.#keepAddress();
  }

  help() {
    byId("help").showModal();
  }

  clear() {
    this.#select(null);
    this.leave();
  }

  hover(x, y) {
    this.#hover = this.#hit(x, y);
    const details = this.#hover && this.#detailsOf(this.#hover);
    this.#tooltip.hidden = !details;
    if (details) {
      this.#tooltip.replaceChildren(...detailsList(details, this.#palette));
      this.#placeTooltip(x, y);
    }
    this.#redraw();
  }

  leave() {
    this.#hover = null;
    this.#tooltip.hidden = true;
    this.#redraw();
  }

  click(x, y) {
    const hit = this.#hit(x, y);
    this.#select(hit && hit.id >= 0 ? { at: hit.at, id: hit.id } : null);
  }

  focusAt(x, y) {
    this.click(x, y);
    this.focus();
  }

  /** Zoom to the selected action. */
  focus() {
    const action = this.#selectedAction();
    if (!action) return;
    const around = Math.max(action.end - action.start, this.#viewport.whole * 1e-6) * 3;
    this.#viewport.show(action.start - around, action.end + around, true);
    this.#reveal();
  }

  /** Select the next action of the selected one's rank, or the first in view. */
  step(by) {
    const action = this.#selectedAction();
    if (!action) return this.#selectNear(0, 0, this.#viewport.t0);
    const i = Math.max(0, Math.min(action.lane.count - 1, action.i + by));
    return this.#select({ at: this.#selected.at, id: action.lane.offset + i }, true);
  }

  /** Select what the rank below or above does at the time of the selected action. */
  stepRank(by) {
    const action = this.#selectedAction();
    if (!action) return this.#selectNear(0, 0, this.#viewport.t0);
    const rows = this.#layout.rows;
    const row = rows[rows.indexOf(rowOf(this.#layout, this.#selected.at, action.rank)) + by];
    return row && this.#selectNear(row.at, row.rank, (action.start + action.end) / 2);
  }

  // Inside.

  #x(t) {
    const { t0, t1 } = this.#viewport;
    return LEFT + ((t - t0) / (t1 - t0)) * this.#layout.plot.width;
  }

  #time(x) {
    const { t0, t1 } = this.#viewport;
    return t0 + ((x - LEFT) / this.#layout.plot.width) * (t1 - t0);
  }

  #hit(x, y) {
    const row = rowAt(this.#layout, y, this.#scroller.scrollTop);
    const { plot } = this.#layout;
    const inPlot = x >= plot.x && x <= plot.x + plot.width;
    const t = inPlot ? this.#time(x) : undefined;
    if (!row) return inPlot && y > 0 ? { at: -1, rank: -1, id: -1, t } : null;
    if (!inPlot) return { at: row.at, rank: row.rank, id: -1 };
    const onLane = y < TOP + row.stripY - this.#scroller.scrollTop;
    const tolerance = ((this.#viewport.t1 - this.#viewport.t0) * HIT_PIXELS) / plot.width;
    return { at: row.at, rank: row.rank, id: onLane ? row.model.actionAt(row.rank, t, tolerance) : -1, t };
  }

  #detailsOf({ at, rank, id, t }) {
    const model = this.#models[at];
    if (!model) return null;
    if (id >= 0) return actionDetails(model, id);
    return t === undefined ? rankDetails(model, rank) : idleDetails(model, rank, t);
  }

  #placeTooltip(x, y) {
    const box = this.#canvas.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.#tooltip;
    let left = box.left + x + 16;
    let top = box.top + y + 18;
    if (left + offsetWidth > window.innerWidth - 8) left = box.left + x - offsetWidth - 12;
    if (top + offsetHeight > window.innerHeight - 8) top = box.top + y - offsetHeight - 14;
    this.#tooltip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  }

  #selectedAction() {
    return this.#selected && this.#models[this.#selected.at].action(this.#selected.id);
  }

  #selectNear(at, rank, t) {
    const id = this.#models[at]?.actionAt(rank, t, Infinity) ?? -1;
    if (id >= 0) this.#select({ at, id }, true);
  }

  #select(selected, reveal = false) {
    this.#selected = selected;
    const panel = byId("selection");
    panel.hidden = !selected;
    if (selected) panel.replaceChildren(...detailsList(actionDetails(this.#models[selected.at], selected.id), this.#palette));
    if (selected && reveal) this.#reveal();
    this.#redraw();
  }

  /** Bring the selected action into view. */
  #reveal() {
    const action = this.#selectedAction();
    const { t0, t1 } = this.#viewport;
    const row = rowOf(this.#layout, this.#selected.at, action.rank);
    const view = this.#scroller.clientHeight - TOP;
    const { scrollTop } = this.#scroller;
    if (row.y < scrollTop) this.#scroller.scrollTop = row.y - 30;
    else if (row.y + row.height > scrollTop + view) this.#scroller.scrollTop = row.y + row.height - view + 10;
    const middle = (action.start + action.end) / 2;
    if (!this.#viewport.moving && (action.end < t0 || action.start > t1)) {
      this.#viewport.show(middle - (t1 - t0) / 2, middle + (t1 - t0) / 2, true);
    }
  }

  #restyle() {
    this.#palette = palette(this.#dark.matches, Math.max(1, ...this.#models.map((model) => model.chunks)));
    renderSummary(byId("summary"), this.#models, this.#palette);
    renderLegend(byId("legend"), this.#models, this.#palette);
    if (this.#selected) this.#select(this.#selected);
    this.#redraw();
  }

  #relayout() {
    const size = { width: this.#scroller.clientWidth, height: this.#scroller.clientHeight };
    const room = size.height + byId("selection").offsetHeight; // rows keep their height while something is selected
    this.#layout = layOut(this.#models, { ...size, room, memory: this.#show.memory });
    this.#canvas.style.height = `${size.height}px`;
    byId("content").style.height = `${Math.max(this.#layout.contentHeight, size.height)}px`;
    this.#redraw();
  }

  #redraw() {
    if (this.#pending || !this.#layout) return;
    this.#pending = true;
    requestAnimationFrame(() => {
      this.#pending = false;
      const begun = performance.now();
      const { t0, t1, whole } = this.#viewport;
      this.#painter.draw({
        models: this.#models, layout: this.#layout, view: { t0, t1 }, whole, scroll: this.#scroller.scrollTop,
        palette: this.#palette, show: this.#show, hover: this.#hover, selected: this.#selected, range: this.#range,
        generation: this.#generation,
      });
      this.frames.push(performance.now() - begun);
      if (this.frames.length > FRAMES_KEPT) this.frames.shift();
    });
  }

  #wireButtons() {
    const on = (id, act) => byId(id).addEventListener("click", act);
    on("zoom-in", () => this.zoom(1.6));
    on("zoom-out", () => this.zoom(1 / 1.6));
    on("fit", () => this.fit());
    on("show-help", () => this.help());
    for (const what of Object.keys(this.#show)) {
      on(`toggle-${what}`, () => this.toggle(what));
      byId(`toggle-${what}`).setAttribute("aria-pressed", String(this.#show[what]));
    }
    byId("keys").replaceChildren(
      ...KEYS.flatMap(({ show, text }) => [element("dt", {}, element("kbd", {}, show)), element("dd", {}, text)]),
    );
    byId("causes").replaceChildren(
      ...Object.entries(CAUSE_TEXTS).flatMap(([cause, text]) => [element("dt", {}, cause), element("dd", {}, text)]),
    );
  }

  #startPanel(live, given) {
    const form = byId("panel");
    form.hidden = false;
    this.#panel = new Panel(
      form, live,
      (state) => this.#setState(state),
      (payloads) => this.setTimelines(payloads),
    );
    const linked = Object.keys(given).length > 0;
    if (linked) this.#panel.settings = given;
    if (linked || !this.#models.length) this.#panel.run();
  }

  #setState(state) {
    this.#state = state;
    this.#keepAddress();
    document.body.dataset.state = state;
    this.#scroller.setAttribute("aria-busy", String(state === "busy"));
    byId("stale").textContent = {
      busy: "Simulating…",
      refused: "Not simulated: what is below belongs to the settings before.",
      current: "",
    }[state];
  }

  #keepAddress() {
    clearTimeout(this.#addressTimer);
    this.#addressTimer = setTimeout(() => {
      const shown = Object.keys(this.#show).filter((what) => this.#show[what]);
      const { t0, t1, whole } = this.#viewport;
      writeAddress({
        settings: this.#panel?.settings ?? {},
        show: shown.join() === SHOWN_AT_FIRST ? null : shown,
        time: t1 - t0 < whole * 0.999 ? [t0, t1] : null,
      });
    }, ADDRESS_MS);
  }
}

const page = new Page();
page.start();
window.wavetrainView = Object.freeze({
  state: () => page.describe(),
  locate: (at, kind, stage, microBatch) => page.locate(at, kind, stage, microBatch),
  settled: () => page.settled(),
  frames: page.frames,
});
