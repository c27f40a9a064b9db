// Colours. The hues are Okabe and Ito's, which people with any colour vision can tell apart; a rank's stages are told apart by
// lightness, from the first stage (full) to the last (pale on a light page, deep on a dark one).

const LIGHT_KINDS = ["#0072b2", "#d55e00", "#e69f00", "#009e73"]; // F, B, I, W
const DARK_KINDS = ["#3d9be0", "#e8743b", "#f0b429", "#27b98d"];

const LIGHT = {
  kinds: LIGHT_KINDS, paleTo: "#ffffff", paleness: 0.55,
  page: "#f6f7f9", surface: "#ffffff", lane: "#e9ecf0", grid: "#d3d8df", ink: "#1c2128", muted: "#5b6572", line: "#ccd2da",
  critical: "#b3004b", cap: "#b3004b", memory: "#7a869a", memoryFill: "#aeb8c6", select: "#1c2128", marker: "#1c2128",
};
const DARK = {
  kinds: DARK_KINDS, paleTo: "#10151c", paleness: 0.5,
  page: "#0f1319", surface: "#171c24", lane: "#232a34", grid: "#343d4a", ink: "#e8edf3", muted: "#9aa5b3", line: "#333c48",
  critical: "#ff6ea8", cap: "#ff6ea8", memory: "#8d9bb0", memoryFill: "#5b6a80", select: "#ffffff", marker: "#e8edf3",
};

/** Why ranks idle. Greys for the two ends of a step, hues of different lightness for what happens in between. */
const CAUSE_COLORS = {
  light: ["#ccd2da", "#98a2af", "#56b4e9", "#5e3c99", "#b3004b", "#d9c700"],
  dark: ["#55606d", "#8b96a3", "#7cc7f2", "#8467d6", "#ff6ea8", "#f0e442"],
};

export const CAUSE_TEXTS = {
  "warm-up": "before the rank's first action",
  drain: "after its last action",
  message: "what its next action needs is done, and on its way",
  imbalance: "the rank that makes what its next action needs is still at it",
  "memory cap": "it could do another forward, had it room for the activations",
  overhead: "what its next action needs has arrived, yet it did not start",
};

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function mix(a, b, share) {
  return a.map((value, i) => value + (b[i] - value) * share);
}

function css(color) {
  return `rgb(${color.map(Math.round).join(" ")})`;
}

function luminance(color) {
  const [r, g, b] = color.map((v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** The colours of one scheme for timelines whose ranks have up to `chunks` stages. */
export function palette(dark, chunks) {
  const base = dark ? DARK : LIGHT;
  const pale = rgb(base.paleTo);
  const lane = rgb(base.lane);
  const fills = base.kinds.map((hex) =>
    Array.from({ length: chunks }, (_, chunk) => {
      const color = mix(rgb(hex), pale, chunks > 1 ? (base.paleness * chunk) / (chunks - 1) : 0);
      const ink = luminance(color) > 0.2 ? "#10151c" : "#ffffff";
      return { color, css: css(color), faded: mix(color, lane, 0.78), ink };
    }),
  );
  return { ...base, dark, fills, laneColor: lane, causes: dark ? CAUSE_COLORS.dark : CAUSE_COLORS.light };
}
