// Numbers, times and actions in words.

export const KIND_NAMES = ["forward", "backward", "backward-input", "backward-weight"];

const UNITS = [
  { symbol: "s", seconds: 1 },
  { symbol: "ms", seconds: 1e-3 },
  { symbol: "µs", seconds: 1e-6 },
  { symbol: "ns", seconds: 1e-9 },
];

/** The unit in which a length of time has at least one digit before its point. */
export function timeUnit(seconds) {
  return UNITS.find((unit) => Math.abs(seconds) >= unit.seconds) ?? (seconds === 0 ? UNITS[0] : UNITS.at(-1));
}

/** At most `digits` significant digits, without trailing zeros: 4, 0.25, 3.333. */
export function shortNumber(value, digits = 4) {
  if (value === 0 || !Number.isFinite(value)) return String(value);
  const whole = Math.max(digits, Math.floor(Math.log10(Math.abs(value))) + 1); // never rounds before the point
  return String(Number(value.toPrecision(Math.min(whole, 21)))).replace("-", "−");
}

/** A length of time, or a moment if `scale` says how long the whole is. */
export function formatSeconds(value, scale = value) {
  const unit = timeUnit(scale);
  const digits = scale === value ? 4 : 5;
  return `${shortNumber(value / unit.seconds, digits)} ${unit.symbol}`;
}

export function formatPercent(fraction) {
  return `${(100 * fraction).toFixed(1)} %`;
}

export function formatCount(value) {
  return value.toLocaleString("en-US").replaceAll(",", "\u202f");
}

export function formatBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${shortNumber(value, 4)} ${units[at]}`;
}

export function plural(value, noun) {
  return `${shortNumber(value)} ${noun}${value === 1 ? "" : noun.endsWith("h") ? "es" : "s"}`;
}

/** "F of stage 2, micro-batch 5", as error messages of wavetrain spell it. */
export function describe({ kind, stage, microBatch }) {
  return `${"FBIW"[kind]} of stage ${stage}, micro-batch ${microBatch}`;
}

/** Ticks of an axis from t0 to t1, about one every `spacing` of `width` pixels: {step, unit, first}. */
export function axisTicks(t0, t1, width, spacing) {
  const raw = ((t1 - t0) * spacing) / Math.max(1, width);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  return { step, unit: timeUnit(Math.max(Math.abs(t0), Math.abs(t1))), first: Math.ceil(t0 / step - 1e-9) };
}

/** The label of a tick, with as many decimals as its step needs. */
export function tickLabel(value, step, unit) {
  const decimals = Math.max(0, -Math.floor(Math.log10(step / unit.seconds) + 1e-9));
  return `${(value / unit.seconds).toFixed(Math.min(decimals, 15))} ${unit.symbol}`.replace("-", "−");
}
