// Draws a scene: {models, layout, view: {t0, t1}, scroll, palette, show: {critical, messages, memory}, hover, selected}.
// One pass a frame, over what is visible only.

import { KIND_LETTERS, upperBound } from "./model.js";
import { axisTicks } from "./words.js";
import { LEFT, OVERVIEW, TOP, rowOf, xOf, yOf } from "./layout.js";
import { FONT, drawAxis, drawGutters, drawRange, drawTitle } from "./margins.js";
import { Raster, colorTable, heldByPixel } from "./raster.js";

const TEXT_LEAST = 9; // pixels of the narrowest box that may hold a number
const MESSAGE_ROOM = 40; // pixels of a lane that an arrow needs to be told apart
const MESSAGES_MOST = 600; // arrows of a timeline; more are slow where there is no graphics card

export class Painter {
  #canvas;
  #context;
  #lanes = new Raster();
  #overview = new Raster();
  #overviewOf = "";
  #held = new Float64Array(0);
  #textWidths = new Map();
  #textSize = 0;
  #scene = null;

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d", { alpha: false });
  }

  draw(scene) {
    this.#scene = scene;
    const { width, height } = scene.layout;
    const ratio = window.devicePixelRatio || 1;
    if (this.#canvas.width !== Math.round(width * ratio) || this.#canvas.height !== Math.round(height * ratio)) {
      this.#canvas.width = Math.round(width * ratio);
      this.#canvas.height = Math.round(height * ratio);
    }
    const context = this.#context;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = scene.palette.surface;
    context.fillRect(0, 0, width, height);
    context.textBaseline = "middle";
    const visible = scene.layout.rows.filter((row) => yOf(this.#scene, row) + row.height > TOP && yOf(this.#scene, row) < height);
    this.#clipped(LEFT, TOP, scene.layout.plot.width, height - TOP, () => {
      this.#drawBoxes(visible, ratio);
      this.#drawGrid();
      if (scene.layout.rows[0]?.strip) visible.forEach((row) => this.#drawMemory(row));
      this.#drawEnds();
      if (scene.show.messages) {
        context.globalAlpha = scene.show.critical ? 0.3 : 1;
        this.#drawMessages(visible);
        context.globalAlpha = 1;
      }
      if (scene.show.critical) scene.models.forEach((model, at) => this.#drawPath(model, at));
      for (const mark of [scene.selected, scene.hover]) if (mark?.id >= 0) this.#drawMark(mark);
    });
    this.#clipped(0, TOP, width, height - TOP, () => {
      visible.forEach((row) => drawGutters(context, scene, row));
      scene.layout.titles.forEach((title) => drawTitle(context, scene, title));
    });
    drawAxis(context, scene);
    if (scene.range) drawRange(context, scene);
    this.#drawOverview(ratio);
  }

  #clipped(x, y, width, height, body) {
    this.#context.save();
    this.#context.beginPath();
    this.#context.rect(x, y, width, height);
    this.#context.clip();
    body();
    this.#context.restore();
  }

  #pixelView(ratio) {
    const { view, layout, show } = this.#scene;
    const width = Math.round(layout.plot.width * ratio);
    return { t0: view.t0, scale: width / (view.t1 - view.t0), width, gap: ratio, fade: show.critical };
  }

  #rowOf(at, rank) {
    return rowOf(this.#scene.layout, at, rank);
  }

  #table() {
    const { palette } = this.#scene;
    return colorTable(palette, palette.fills[0].length);
  }

  #drawBoxes(rows, ratio) {
    const { palette, layout } = this.#scene;
    const groups = rows.map((row) => [row.model.lanes[row.rank]]);
    this.#lanes.render(groups, this.#table(), palette.laneColor, this.#pixelView(ratio));
    rows.forEach((row, at) => {
      this.#lanes.stretch(this.#context, at, LEFT, yOf(this.#scene, row), layout.plot.width, row.lane);
    });
    const size = Math.max(9, Math.min(12, layout.rows[0]?.lane - 4));
    this.#context.font = `${size}px ${FONT}`;
    this.#context.textAlign = "center";
    if (size !== this.#textSize) this.#textWidths.clear();
    this.#textSize = size;
    rows.forEach((row) => this.#drawLabels(row));
  }

  #drawLabels(row) {
    const { view, layout, palette, show } = this.#scene;
    const lane = row.model.lanes[row.rank];
    const [from, to] = lane.visible(view.t0, view.t1);
    const scale = layout.plot.width / (view.t1 - view.t0);
    if ((to - from) * TEXT_LEAST > layout.plot.width * 1.5) return; // nothing would fit
    const middle = yOf(this.#scene, row) + row.lane / 2 + 0.5;
    for (let i = from; i < to; i++) {
      const x0 = Math.max(LEFT, LEFT + (lane.start[i] - view.t0) * scale);
      const x1 = Math.min(LEFT + layout.plot.width, LEFT + (lane.end[i] - view.t0) * scale);
      const room = x1 - x0 - 4;
      if (room < TEXT_LEAST - 4) continue;
      const text = this.#label(lane, i, room);
      if (!text) continue;
      const faded = show.critical && !lane.critical[i];
      this.#context.fillStyle = faded ? palette.muted : palette.fills[lane.kind[i]][lane.chunk[i]].ink;
      this.#context.fillText(text, (x0 + x1 - 1) / 2, middle);
    }
  }

  /** The longest label that fits: "F5 · stage 2", "F5", "5" or none. */
  #label(lane, i, room) {
    const number = String(lane.microBatch[i]);
    if (this.#textWidth(number) > room) return "";
    const letter = KIND_LETTERS[lane.kind[i]] + number;
    if (this.#textWidth(letter) + 5 > room) return number;
    const full = `${letter} · stage ${lane.stage[i]}`;
    return room < 60 || this.#textWidth(full) + 10 > room ? letter : full;
  }

  #textWidth(text) {
    let width = this.#textWidths.get(text);
    if (width === undefined) {
      if (this.#textWidths.size > 20000) this.#textWidths.clear();
      width = this.#context.measureText(text).width;
      this.#textWidths.set(text, width);
    }
    return width;
  }

  #drawGrid() {
    const { view, layout, palette } = this.#scene;
    const { step, first } = axisTicks(view.t0, view.t1, layout.plot.width, 110);
    const context = this.#context;
    context.fillStyle = palette.grid;
    context.globalAlpha = 0.5;
    for (let n = first; n * step <= view.t1; n++) {
      const x = Math.round(xOf(this.#scene, n * step));
      for (const row of layout.rows) context.fillRect(x, yOf(this.#scene, row) + row.lane, 1, row.height - row.lane + (row.strip ? 6 : 3));
    }
    context.globalAlpha = 1;
  }

  #drawMemory(row) {
    const { view, layout, palette, models } = this.#scene;
    const context = this.#context;
    const lane = row.model.lanes[row.rank];
    const width = Math.ceil(layout.plot.width);
    if (this.#held.length < width) this.#held = new Float64Array(width);
    const held = heldByPixel(lane, { t0: view.t0, scale: width / (view.t1 - view.t0), width }, this.#held);
    const most = Math.max(...models.map((model) => model.mostHeld)) * 1.08;
    const base = TOP + row.stripY - this.#scene.scroll + row.strip;
    const height = (value) => (value / most) * (row.strip - 1);
    context.beginPath();
    context.moveTo(LEFT, base);
    for (let from = 0; from < width; ) {
      let to = from + 1;
      while (to < width && held[to] === held[from]) to += 1;
      context.lineTo(LEFT + from, base - height(held[from]));
      context.lineTo(LEFT + to, base - height(held[from]));
      from = to;
    }
    context.lineTo(LEFT + width, base);
    context.fillStyle = palette.memoryFill;
    context.fill();
    context.fillStyle = palette.line;
    context.fillRect(LEFT, base, layout.plot.width, 1);
    if (lane.cap !== null) {
      context.strokeStyle = palette.cap;
      context.lineWidth = 1;
      context.setLineDash([4, 3]);
      const y = Math.round(base - height(lane.cap)) + 0.5;
      this.#line([[LEFT, y], [LEFT + layout.plot.width, y]]);
      context.setLineDash([]);
    }
  }

  #line(points) {
    const context = this.#context;
    context.beginPath();
    points.forEach(([x, y], at) => (at ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.stroke();
  }

  /** Where each timeline ends. */
  #drawEnds() {
    const { layout, palette, scroll } = this.#scene;
    const context = this.#context;
    context.fillStyle = palette.marker;
    for (const title of layout.titles) {
      const x = Math.round(xOf(this.#scene, title.model.makespan));
      context.fillRect(x, TOP + title.y + title.height - 4 - scroll, 1.5, title.end - title.y - title.height + 4);
    }
  }

  /** All visible messages of a timeline, or none if there is no room to tell them apart. */
  #drawMessages(rows) {
    const { view, models, layout } = this.#scene;
    models.forEach((model, at) => {
      const shown = new Set(rows.filter((row) => row.at === at).map((row) => row.rank));
      const [from, to] = model.visibleMessages(view.t0, view.t1);
      if (!shown.size || (to - from) * MESSAGE_ROOM > layout.plot.width * model.ranks) return;
      const { source, target } = model.messages;
      const found = [];
      for (let i = from; i < to; i++) if (shown.has(source[i]) || shown.has(target[i])) found.push(i);
      if (found.length <= MESSAGES_MOST) this.#drawArrows(model, at, found, 1);
    });
  }

  /** Messages as arrows from when they were sent to when they arrived; one path for all, for speed. */
  #drawArrows(model, at, messages, thick) {
    const { palette } = this.#scene;
    const { source, target, sent, end } = model.messages;
    const lines = new Path2D();
    const tips = new Path2D();
    for (const i of messages) {
      const from = this.#rowOf(at, source[i]);
      const to = this.#rowOf(at, target[i]);
      const down = to.y > from.y ? 1 : -1;
      const y0 = yOf(this.#scene, from) + from.lane * (0.5 + 0.3 * down);
      const y1 = yOf(this.#scene, to) + to.lane * (0.5 - 0.28 * down);
      const x0 = xOf(this.#scene, sent[i]) - 2;
      const x1 = xOf(this.#scene, end[i]);
      const reach = Math.min(14, Math.max(3, (x1 - x0) / 2));
      lines.moveTo(x0, y0);
      lines.bezierCurveTo(x0 + reach, y0, x1 - reach - 4, y1, x1 - 3, y1);
      tips.moveTo(x1 + 1, y1);
      tips.lineTo(x1 - 4.5, y1 - 3);
      tips.lineTo(x1 - 4.5, y1 + 3);
      tips.rect(x0 - 1.5, y0 - 1.5, 3, 3);
    }
    const context = this.#context;
    context.strokeStyle = palette.surface; // a halo, so that an arrow can be followed across boxes
    context.lineWidth = thick + 2;
    context.stroke(lines);
    context.strokeStyle = context.fillStyle = palette.ink;
    context.lineWidth = thick;
    context.stroke(lines);
    context.fill(tips);
  }

  #drawPath(model, at) {
    const { view, palette } = this.#scene;
    const context = this.#context;
    const points = [];
    const first = Math.max(0, upperBound(model.pathRunEnds, view.t0) - 1);
    for (let n = first; n < model.pathRuns.length; n++) {
      const run = model.pathRuns[n];
      const row = this.#rowOf(at, run.rank);
      const y = yOf(this.#scene, row) + row.lane - 1.5;
      points.push([xOf(this.#scene, run.start), y], [xOf(this.#scene, run.end), y]);
      if (run.start > view.t1) break;
    }
    context.lineJoin = "round";
    const thick = points.length > 400 ? 1.25 : 2.5;
    context.strokeStyle = palette.surface;
    context.lineWidth = thick + 2;
    this.#line(points);
    context.strokeStyle = palette.critical;
    context.lineWidth = thick;
    this.#line(points);
  }

  /** An outline around an action, around what it needs, and its messages. */
  #drawMark({ at, id }) {
    const { models, palette } = this.#scene;
    const model = models[at];
    const action = model.action(id);
    const messages = [model.messageTo(action), model.messageFrom(action)].filter((message) => message >= 0);
    this.#drawArrows(model, at, messages, 2);
    const needed = model.needs(action);
    if (needed >= 0) this.#outline(at, model.action(needed), 1, palette.select, [3, 2]);
    this.#outline(at, action, 2, palette.select, []);
  }

  #outline(at, action, thick, color, dash) {
    const row = this.#rowOf(at, action.rank);
    const x0 = xOf(this.#scene, action.start);
    const context = this.#context;
    context.strokeStyle = color;
    context.lineWidth = thick;
    context.setLineDash(dash);
    context.strokeRect(x0, yOf(this.#scene, row), Math.max(1, xOf(this.#scene, action.end) - x0 - 1), row.lane);
    context.setLineDash([]);
  }

  /** The whole of all timelines in a strip, with the visible part framed. */
  #drawOverview(ratio) {
    const { models, layout, palette, view, whole } = this.#scene;
    const width = Math.round(layout.plot.width * ratio);
    const of = JSON.stringify([width, palette.dark, whole, this.#scene.generation]);
    if (of !== this.#overviewOf) {
      const groups = models.map((model) => model.lanes);
      this.#overview.render(groups, this.#table(), palette.laneColor, { t0: 0, scale: width / whole, width, gap: 0, fade: false });
      this.#overviewOf = of;
    }
    const context = this.#context;
    const each = (OVERVIEW - 6) / Math.max(1, models.length);
    models.forEach((_, at) => {
      this.#overview.stretch(context, at, LEFT, 4 + at * each, layout.plot.width, each - (at + 1 < models.length ? 1 : 0));
    });
    const x0 = LEFT + Math.max(0, (view.t0 / whole) * layout.plot.width);
    const x1 = LEFT + Math.min(layout.plot.width, (view.t1 / whole) * layout.plot.width);
    context.fillStyle = palette.surface;
    context.globalAlpha = 0.65;
    context.fillRect(LEFT, 4, x0 - LEFT, OVERVIEW - 6);
    context.fillRect(x1, 4, LEFT + layout.plot.width - x1, OVERVIEW - 6);
    context.globalAlpha = 1;
    context.strokeStyle = palette.ink;
    context.lineWidth = 1.5;
    context.strokeRect(x0, 3.5, Math.max(3, x1 - x0), OVERVIEW - 5);
  }
}
