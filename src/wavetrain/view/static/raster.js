// Lanes as rows of pixels. A pixel is the mean of the colours of all actions in it, weighted by the time they take, so that a
// lane of 10⁵ actions costs a pass over its visible ones and one image, and looks right at every zoom.

import { upperBound } from "./model.js";

/** Colours by kind and chunk as one flat table, and the same faded for what is off the critical path. */
export function colorTable(palette, chunks) {
  const table = { chunks, full: new Float32Array(12 * chunks), faded: new Float32Array(12 * chunks) };
  palette.fills.forEach((fills, kind) =>
    fills.forEach(({ color, faded }, chunk) => {
      table.full.set(color, 3 * (kind * chunks + chunk));
      table.faded.set(faded, 3 * (kind * chunks + chunk));
    }),
  );
  return table;
}

/** Add the visible actions of a lane to `sums`: red, green, blue and covered share of every pixel from t0 on. */
function addLane(sums, lane, table, { t0, scale, width, weight, gap, fade }) {
  const { start, end, kind, chunk, critical } = lane;
  const [from, to] = lane.visible(t0, t0 + width / scale);
  for (let i = from; i < to; i++) {
    let x0 = (start[i] - t0) * scale;
    let x1 = (end[i] - t0) * scale;
    const length = x1 - x0;
    if (length > 3 * gap) x1 -= Math.min(gap, (length - 3 * gap) / 4); // a hairline between neighbours, once there is room
    if (x0 < 0) x0 = 0;
    if (x1 > width) x1 = width;
    const colors = fade && !critical[i] ? table.faded : table.full;
    const at = 3 * (kind[i] * table.chunks + chunk[i]);
    const r = colors[at];
    const g = colors[at + 1];
    const b = colors[at + 2];
    const last = Math.min(width - 1, Math.floor(x1));
    for (let pixel = Math.floor(x0); pixel <= last; pixel++) {
      const share = (Math.min(x1, pixel + 1) - Math.max(x0, pixel)) * weight;
      if (share <= 0) continue;
      const p = 4 * pixel;
      sums[p] += r * share;
      sums[p + 1] += g * share;
      sums[p + 2] += b * share;
      sums[p + 3] += share;
    }
  }
}

/** Pixel rows on a canvas of their own, one a lane, to be stretched over the lanes. */
export class Raster {
  #canvas = document.createElement("canvas");
  #context = this.#canvas.getContext("2d");
  #sums = new Float32Array(0);

  /** Draw one row for each group of lanes. `view` is {t0, scale: pixels a second, width: pixels}. */
  render(groups, table, background, view) {
    const { width } = view;
    if (this.#canvas.width !== width || this.#canvas.height < groups.length) {
      this.#canvas.width = width;
      this.#canvas.height = Math.max(1, groups.length);
      this.#sums = new Float32Array(4 * width);
    }
    const image = this.#context.createImageData(width, Math.max(1, groups.length));
    const pixels = image.data;
    const sums = this.#sums;
    groups.forEach((lanes, row) => {
      sums.fill(0);
      for (const lane of lanes) addLane(sums, lane, table, { ...view, weight: 1 / lanes.length });
      const offset = 4 * width * row;
      for (let p = 0; p < 4 * width; p += 4) {
        const free = Math.max(0, 1 - sums[p + 3]);
        pixels[offset + p] = sums[p] + background[0] * free;
        pixels[offset + p + 1] = sums[p + 1] + background[1] * free;
        pixels[offset + p + 2] = sums[p + 2] + background[2] * free;
        pixels[offset + p + 3] = 255;
      }
    });
    this.#context.putImageData(image, 0, 0);
  }

  /** Stretch a row over a rectangle of another canvas. */
  stretch(context, row, x, y, width, height) {
    context.imageSmoothingEnabled = false;
    context.drawImage(this.#canvas, 0, row, this.#canvas.width, 1, x, y, width, height);
  }
}

/** The most that a lane holds in every pixel. */
export function heldByPixel(lane, { t0, scale, width }, into) {
  const { held, heldFrom } = lane;
  into.fill(0, 0, width);
  const t1 = t0 + width / scale;
  let i = Math.max(0, upperBound(heldFrom, t0) - 1);
  for (; i < lane.count && heldFrom[i] <= t1; i++) {
    const until = i + 1 < lane.count ? heldFrom[i + 1] : Infinity;
    const last = Math.min(width - 1, Math.floor((until - t0) * scale));
    const value = held[i];
    for (let pixel = Math.max(0, Math.floor((heldFrom[i] - t0) * scale)); pixel <= last; pixel++) {
      if (value > into[pixel]) into[pixel] = value;
    }
  }
  return into;
}
