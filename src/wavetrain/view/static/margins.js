// What stands around the boxes: ranks at the left, idle time at the right, the title of each timeline, the time axis. Functions of
// a canvas context and a scene (see painter.js).

import { axisTicks, formatPercent, formatSeconds, shortNumber, tickLabel } from "./words.js";
import { LEFT, RIGHT, TOP, xOf, yOf } from "./layout.js";

export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", "DejaVu Sans", sans-serif';

export function drawGutters(context, scene, row) {
  const { layout, palette, hover } = scene;
  const y = yOf(scene, row);
  context.fillStyle = palette.surface;
  context.fillRect(0, y - 2, LEFT, row.height + 6);
  context.fillRect(layout.width - RIGHT, y - 2, RIGHT, row.height + 6);
  const here = hover && hover.at === row.at && hover.rank === row.rank;
  context.font = `${here ? "600 " : ""}${Math.min(12, row.lane - 1)}px ${FONT}`;
  context.fillStyle = here ? palette.ink : palette.muted;
  context.textAlign = "right";
  context.fillText(`rank ${row.rank}`, LEFT - 10, y + row.lane / 2 + 0.5);
  if (row.strip) {
    const { peaks, lanes } = row.model;
    const cap = lanes[row.rank].cap;
    context.font = `${Math.min(10, row.strip)}px ${FONT}`;
    context.fillStyle = cap !== null && peaks[row.rank] > cap * (1 + 1e-9) ? palette.cap : palette.muted;
    const text = `${shortNumber(peaks[row.rank], 3)}${cap === null ? "" : ` / ${shortNumber(cap, 3)}`}`;
    context.fillText(text, LEFT - 10, TOP + row.stripY - scene.scroll + row.strip / 2);
  }
  drawIdle(context, scene, row, y);
}

/** A rank's idle time by cause, as bars at the right on a scale that all ranks share. */
function drawIdle(context, scene, row, y) {
  const { layout, palette, models } = scene;
  const idle = row.model.idle[row.rank];
  const total = idle.reduce((a, b) => a + b, 0);
  const share = (value) => (row.model.makespan > 0 ? value / row.model.makespan : 0);
  const most = Math.max(1e-9, ...models.map((model) => model.mostIdle));
  const room = RIGHT - 66;
  const height = Math.min(12, row.lane - 4);
  let x = layout.width - RIGHT + 12;
  idle.forEach((value, cause) => {
    const length = (share(value) / most) * room;
    context.fillStyle = palette.causes[cause];
    context.fillRect(x, y + (row.lane - height) / 2, length, height);
    x += length;
  });
  context.font = `${Math.min(11, row.lane - 1)}px ${FONT}`;
  context.fillStyle = palette.muted;
  context.textAlign = "right";
  context.fillText(formatPercent(share(total)), layout.width - 8, y + row.lane / 2 + 0.5);
}

export function drawTitle(context, scene, { model, at, y, height }) {
  const { layout, palette, models, scroll } = scene;
  const top = TOP + y - scroll;
  if (top + height < TOP || top > layout.height) return;
  context.fillStyle = palette.surface;
  context.fillRect(0, top, layout.width, height - 4);
  let x = LEFT;
  const middle = top + height / 2 - 1;
  context.textAlign = "left";
  if (models.length > 1) {
    context.font = `700 11px ${FONT}`;
    context.fillStyle = palette.ink;
    context.fillRect(x, middle - 8, 16, 16);
    context.fillStyle = palette.surface;
    context.textAlign = "center";
    context.fillText(String.fromCharCode(65 + at), x + 8, middle + 0.5);
    context.textAlign = "left";
    x += 23;
  }
  context.font = `600 13px ${FONT}`;
  context.fillStyle = palette.ink;
  const name = shorten(context, model.name, layout.plot.width * 0.6);
  context.fillText(name, x, middle);
  x += context.measureText(name).width + 10;
  context.font = `12px ${FONT}`;
  context.fillStyle = palette.muted;
  context.fillText(model.source, x, middle);
  x += context.measureText(model.source).width + 12;
  const end = xOf(scene, model.makespan);
  const label = formatSeconds(model.makespan);
  if (end - context.measureText(label).width - 6 > x && end <= LEFT + layout.plot.width) {
    context.textAlign = "right";
    context.fillStyle = palette.ink;
    context.fillText(label, end + 1, middle);
    context.fillStyle = palette.muted;
  }
  if (at === 0) {
    context.textAlign = "left";
    context.fillText("idle", layout.width - RIGHT + 12, middle);
  }
}

export function drawAxis(context, scene) {
  const { view, layout, palette, hover } = scene;
  context.fillStyle = palette.surface;
  context.fillRect(0, 0, layout.width, TOP);
  const { step, unit, first } = axisTicks(view.t0, view.t1, layout.plot.width, 110);
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  context.fillStyle = palette.line;
  context.fillRect(0, TOP - 1, layout.width, 1);
  for (let n = first; n * step <= view.t1; n++) {
    const x = xOf(scene, n * step);
    context.fillStyle = palette.muted;
    context.fillText(tickLabel(n * step, step, unit), x, TOP - 14);
    context.fillRect(Math.round(x), TOP - 6, 1, 5);
  }
  if (hover?.t !== undefined && hover.t >= view.t0 && hover.t <= view.t1) {
    const x = Math.round(xOf(scene, hover.t));
    context.fillStyle = palette.ink;
    context.globalAlpha = 0.35;
    context.fillRect(x, TOP - 6, 1, layout.height);
    context.globalAlpha = 1;
    tag(context, scene, tickLabel(hover.t, step / 20, unit), x);
  }
}

/** The stretch of time being marked, and how long it is. */
export function drawRange(context, scene) {
  const { range, layout, palette } = scene;
  const [x0, x1] = [xOf(scene, range.t0), xOf(scene, range.t1)];
  context.fillStyle = palette.ink;
  context.globalAlpha = 0.14;
  context.fillRect(x0, TOP, x1 - x0, layout.height);
  context.globalAlpha = 1;
  context.fillRect(x0, TOP, 1, layout.height);
  context.fillRect(x1, TOP, 1, layout.height);
  tag(context, scene, formatSeconds(range.t1 - range.t0), (x0 + x1) / 2);
}

/** A label on the axis. */
function tag(context, scene, text, x) {
  const { layout, palette } = scene;
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  const width = context.measureText(text).width + 12;
  const at = Math.min(LEFT + layout.plot.width - width / 2, Math.max(LEFT + width / 2, x));
  context.fillStyle = palette.ink;
  context.fillRect(at - width / 2, TOP - 23, width, 18);
  context.fillStyle = palette.surface;
  context.fillText(text, at, TOP - 13.5);
}

function shorten(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let length = Math.min(text.length, 200);
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}
