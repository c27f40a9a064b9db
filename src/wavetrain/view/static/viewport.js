// The visible stretch of time, [t0, t1] in seconds, and how it moves.

const EDGE = 0.015; // of the whole, shown beyond the end when all is in view
const GLIDE_MS = 140;

export class Viewport {
  t0 = 0;
  t1 = 1;
  #whole = 1;
  #target = null;
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
  }

  /** Seconds that the longest timeline takes, with a little room after it. */
  get whole() {
    return this.#whole;
  }

  get moving() {
    return this.#target !== null;
  }

  /** Take timelines of another length; what was in view stays in view unless all was. */
  setLength(seconds) {
    const all = this.t0 <= 0 && this.t1 >= this.#whole * 0.999;
    this.#whole = Math.max(seconds, 1e-12) * (1 + EDGE);
    this.#target = null;
    if (all) [this.t0, this.t1] = [0, this.#whole];
    else [this.t0, this.t1] = this.#clamp(this.t0, this.t1);
    this.#onChange();
  }

  /** Zoom by a factor (above 1: closer) around a time that stays where it is on the screen. */
  zoom(factor, around, glide = false) {
    const [t0, t1] = this.#target?.to ?? [this.t0, this.t1];
    this.#go(around - (around - t0) / factor, around + (t1 - around) / factor, glide);
  }

  /** Move by a fraction of what is in view. */
  pan(fraction, glide = false) {
    const [t0, t1] = this.#target?.to ?? [this.t0, this.t1];
    const by = (t1 - t0) * fraction;
    this.#go(t0 + by, t1 + by, glide);
  }

  show(t0, t1, glide = false) {
    this.#go(t0, t1, glide);
  }

  fit(glide = false) {
    this.#go(0, this.#whole, glide);
  }

  #clamp(t0, t1) {
    const span = Math.min(this.#whole, Math.max(this.#whole * 1e-6, t1 - t0));
    const middle = (t0 + t1) / 2;
    const from = Math.min(this.#whole - span, Math.max(0, middle - span / 2));
    return [from, from + span];
  }

  #go(t0, t1, glide) {
    const to = this.#clamp(t0, t1);
    const still = !glide || window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (still) {
      this.#target = null;
      [this.t0, this.t1] = to;
      this.#onChange();
      return;
    }
    const idle = this.#target === null;
    this.#target = { from: [this.t0, this.t1], to, since: performance.now() };
    if (idle) requestAnimationFrame(() => this.#step());
  }

  #step() {
    if (this.#target === null) return;
    const { from, to, since } = this.#target;
    const done = Math.min(1, (performance.now() - since) / GLIDE_MS);
    const eased = 1 - (1 - done) ** 3;
    this.t0 = from[0] + (to[0] - from[0]) * eased;
    this.t1 = from[1] + (to[1] - from[1]) * eased;
    if (done < 1) requestAnimationFrame(() => this.#step());
    else {
      this.#target = null;
      [this.t0, this.t1] = to;
    }
    this.#onChange();
  }
}
