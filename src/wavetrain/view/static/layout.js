// Where things stand on the canvas, in CSS pixels. The overview and the axis stay at the top; lanes scroll below them.

export const LEFT = 74;
export const RIGHT = 118;
export const OVERVIEW = 22;
export const TOP = OVERVIEW + 26; // overview and axis

const TITLE = 26;
const GAP = 3;
const STRIP_GAP = 4;
const LANE = { least: 11, most: 44 };
const MEMORY = { least: 15, most: 40 };
const BOTTOM = 10;

/** Rows for every rank of every timeline: as high as fits into `room`, so that a few ranks need no scrolling. */
export function layOut(models, { width, height, room, memory }) {
  const lanes = models.reduce((sum, model) => sum + model.ranks, 0);
  const each = (room - TOP - BOTTOM - models.length * TITLE) / Math.max(1, lanes) - GAP;
  const lane = Math.floor(Math.min(LANE.most, Math.max(LANE.least, memory ? each * 0.5 : each)));
  const strip = memory ? Math.floor(Math.min(MEMORY.most, Math.max(MEMORY.least, each - lane - STRIP_GAP))) : 0;
  const titles = [];
  const rows = [];
  let y = 0;
  models.forEach((model, at) => {
    const title = { model, at, y, height: TITLE, end: 0, firstRow: rows.length };
    titles.push(title);
    y += TITLE;
    for (let rank = 0; rank < model.ranks; rank++) {
      rows.push({ model, at, rank, y, lane, strip, stripY: y + lane + 1, height: lane + (strip ? strip + 1 : 0) });
      y += lane + (strip ? strip + STRIP_GAP : 0) + GAP;
    }
    title.end = y;
  });
  const plot = { x: LEFT, width: Math.max(50, width - LEFT - RIGHT) };
  return { width, height, plot, rows, titles, contentHeight: TOP + y + BOTTOM };
}

/** The row of a rank of the timeline `at`. */
export function rowOf(layout, at, rank) {
  return layout.rows[layout.titles[at].firstRow + rank];
}

/** The row at a height of the canvas, or undefined. */
export function rowAt(layout, y, scroll) {
  if (y < TOP) return undefined;
  const at = y - TOP + scroll;
  return layout.rows.find((row) => at >= row.y - 1 && at < row.y + row.height + 2);
}

/** Where a time is on the canvas of a scene (see painter.js). */
export function xOf({ view, layout }, t) {
  return LEFT + ((t - view.t0) / (view.t1 - view.t0)) * layout.plot.width;
}

/** Where the top of a row is on the canvas of a scene. */
export function yOf({ scroll }, row) {
  return TOP + row.y - scroll;
}
